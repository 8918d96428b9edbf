"""Continue a run with other settings: make a new run that shares the first rounds of an existing one.

    python -m benchmarks.branch RUN CHECKPOINT NEW [KEY=VALUE …]
    fedbe resume NEW

NEW has the rounds of RUN up to the checkpoint, and RUN's recipe with the changes. Its run.json says where it started. A
run keeps only its last two checkpoints, so copy the files that you need. `fedbe resume` alone refuses a checkpoint of
other settings, because the result is not a run of one recipe.
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
    """Write the folder `new` with the rounds of `trunk` up to the checkpoint `file`."""
    info, recipe = run_folder.read_info(trunk), override_recipe(run_folder.read_recipe(trunk), changes)
    state = checkpoint.read(file)
    records = run_folder.read_rounds(trunk)[: state.round]
    if len(records) < state.round:
        raise RunError(f"{file} belongs to another run: it is of round {state.round}, {trunk} has {len(records)}")
    run_folder.create(new, recipe, info.method, info.seed, info.precision)
    new_info = run_folder.read_info(new)
    commit = info.made_with.get("commit", "unknown")
    origin = f"{trunk.parent.name}/{trunk.name}, after round {state.round}, of commit {commit}"
    new_info = replace(new_info, made_with=new_info.made_with | {"begun_from": origin})
    write_json(new / "run.json", vars(new_info))
    write_atomic(new / "rounds.jsonl", "".join(json.dumps(record) + "\n" for record in records).encode())
    identity = provenance.identity(recipe, info.method, info.seed, info.precision, prepare(recipe, info.seed))
    checkpoint.save(new, state, identity)
    print(f"{new} has {state.round} rounds of {trunk}: continue with `fedbe resume {new}`")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit(__doc__)
    try:
        branch(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
    except FedBEError as error:
        sys.exit(str(error))
