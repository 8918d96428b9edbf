"""What if a run had gone on with other settings? Makes a run that shares the first rounds of another.

    python -m benchmarks.branch RUN CHECKPOINT NEW [KEY=VALUE …]
    fedbe resume NEW

NEW has the rounds of RUN up to the checkpoint (a file that a run leaves; it keeps the last two, so copy those that are
wanted) and RUN's recipe with the changes. Its run.json says where it began. `fedbe resume` itself refuses a checkpoint
of other settings, rightly: what comes out is no run of one recipe.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

from fedbe.core.files import write_atomic, write_json
from fedbe.errors import FedBEError, RunError
from fedbe.experiment import checkpoint, provenance, run_folder
from fedbe.experiment.federation import prepare
from fedbe.experiment.recipe_files import override_recipe


def branch(trunk: Path, file: Path, new: Path, changes: list[str]) -> None:
    info, recipe = run_folder.read_info(trunk), override_recipe(run_folder.read_recipe(trunk), changes)
    state = checkpoint.read(file)
    if state is None:
        raise RunError(f"{file} is no checkpoint that can be read")
    shared = run_folder.read_rounds(trunk)[: state.round]
    if len(shared) < state.round:
        raise RunError(f"{file} is of round {state.round}, but {trunk} has {len(shared)} rounds: it is another run's")
    run_folder.create(new, recipe, info.method, info.seed, info.precision)
    begun = run_folder.read_info(new)
    commit = info.made_with.get("commit", "unknown")
    origin = f"{trunk.parent.name}/{trunk.name}, after round {state.round}, of commit {commit}"
    begun = replace(begun, made_with=begun.made_with | {"begun_from": origin})
    write_json(new / "run.json", vars(begun))
    write_atomic(new / "rounds.jsonl", "".join(json.dumps(r) + "\n" for r in shared).encode())
    identity = provenance.identity(recipe, info.method, info.seed, info.precision, prepare(recipe, info.seed))
    checkpoint.save(new, state, identity)
    print(f"{new} has {state.round} rounds of {trunk}: go on with `fedbe resume {new}`")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    try:
        branch(*map(Path, sys.argv[1:4]), sys.argv[4:])
    except FedBEError as error:
        sys.exit(str(error))
