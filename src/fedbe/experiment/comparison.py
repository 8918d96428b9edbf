"""Compare methods on the same splits and initial weights, with a paired t-test over seeds."""

import json
import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean, stdev

from fedbe import data
from fedbe.algorithms.methods import get_method
from fedbe.core.files import write_atomic, write_json
from fedbe.errors import RunError, SettingError
from fedbe.experiment import provenance, run_folder
from fedbe.experiment.federation import Federation, prepare
from fedbe.experiment.recipe import Recipe

PLAN_FILE = "compare.json"  # its methods and seeds


@dataclass(frozen=True)
class Row:
    """One method's accuracies and how they differ from those of the reference method.

    Attributes:
        method: The method's name.
        accuracies: Test accuracies in percent, one for each seed.
        difference: The mean of the paired differences; None for the reference itself.
        spread: The standard deviation of the paired differences; None with fewer than two seeds.
        chance: The two-sided p-value of a paired t-test; None with fewer than two seeds or without spread.
    """

    method: str
    accuracies: tuple[float, ...]
    difference: float | None = None
    spread: float | None = None
    chance: float | None = None

    @property
    def mean(self) -> float:
        """The mean accuracy over seeds, in percent."""
        return mean(self.accuracies)

    @property
    def std(self) -> float | None:
        """The sample standard deviation over seeds; None with one seed."""
        return stdev(self.accuracies) if len(self.accuracies) > 1 else None


def create(
    folder: Path, recipe: Recipe, names: Sequence[str], seeds: Sequence[int], precision: str, device: str = "cpu"
) -> Path:
    """Create the folder of a comparison, with a run folder for each method and seed. Nothing is trained yet.

    Args:
        folder: The folder; it must not exist, or be empty.
        recipe: The settings of all runs.
        names: The methods; the first is the reference.
        seeds: The seeds.
        precision: float32 or bfloat16.
        device: Where the runs train.

    Raises:
        SettingError: A method is unknown or listed twice, or there is none.
        RunError: The folder cannot be created.
    """
    if not names:
        raise SettingError("name at least one method to compare, like --methods fedavg,fedbe")
    if repeated := [name for name in names if names.count(name) > 1]:
        raise SettingError(f"'{repeated[0]}' is listed twice in the methods to compare")
    for name in names:
        recipe.method_for(name)
    with run_folder.new_folder(folder) as part:
        for name in names:
            for seed in seeds:
                run_folder.create(_cell(part, name, seed), recipe, name, seed, precision, device)
        write_json(part / PLAN_FILE, {"methods": list(names), "seeds": list(seeds)})
    return folder


def find_same(runs: Path, recipe: Recipe, names: Sequence[str], seeds: Sequence[int], precision: str) -> Path | None:
    """A comparison in the folder `runs` that would have the same numbers if it were made now, finished or not; or None.

    It has these settings, and its trained runs have the identity that they would have now: the same data, model, torch
    and arithmetic. The data is loaded only to compare that.
    """
    plan = {"methods": list(names), "seeds": list(seeds)}
    task = cache(lambda: data.load_task(recipe.data.source))

    @cache
    def federation(seed: int) -> Federation:
        made = prepare(recipe, seed, task())
        made.build_model()  # imports a model of the user, whose source is a part of the identity
        return made

    def is_same(cell: Path) -> bool:
        info = run_folder.read_info(cell)
        if run_folder.read_recipe(cell) != recipe or info.precision != precision:
            return False
        if info.identity is None:  # never trained, or by a version that did not note it
            return not run_folder.read_rounds(cell)
        now = provenance.identity(recipe, info.method, info.seed, precision, federation(info.seed))
        return info.identity == now

    for folder in sorted(path.parent for path in runs.glob(f"*/{PLAN_FILE}")):
        try:
            if _plan(folder) == plan and all(is_same(path) for path in cells(folder)):
                return folder
        except RunError:
            continue
    return None


def is_comparison(folder: Path) -> bool:
    """Whether a folder is a comparison."""
    return (folder / PLAN_FILE).is_file()


def cells(folder: Path) -> list[Path]:
    """The run folders of a comparison, seed by seed, so that an early stop leaves complete seeds."""
    plan = _plan(folder)
    return [_cell(folder, name, seed) for seed in plan["seeds"] for name in plan["methods"]]


def first_round(cell: Path) -> Path:
    """The folder where the runs of one seed share the trained clients of round 1."""
    return cell.parent / f"first-round-seed{run_folder.read_info(cell).seed}"


def drop_first_rounds(folder: Path) -> None:
    """Remove the shared first rounds of the seeds whose runs are all finished."""
    needed = {first_round(cell) for cell in cells(folder) if not run_folder.read_info(cell).finished}
    for shared in set(folder.glob("first-round-*")) - needed:
        shutil.rmtree(shared, ignore_errors=True)


def table(folder: Path) -> list[Row]:
    """A row for each method, in the order of the comparison; the first method is the reference.

    Raises:
        RunError: The folder is not a comparison, or a run is not finished.
    """
    plan = _plan(folder)
    accuracies = {
        name: tuple(100 * _accuracy(_cell(folder, name, seed)) for seed in plan["seeds"]) for name in plan["methods"]
    }
    reference = plan["methods"][0]
    return [
        row(name, values, None if name == reference else accuracies[reference]) for name, values in accuracies.items()
    ]


def row(name: str, accuracies: tuple[float, ...], reference: tuple[float, ...] | None) -> Row:
    """The row of one method.

    Args:
        name: The method's name.
        accuracies: In percent, one for each seed.
        reference: The accuracies of the reference method on the same seeds; None for the reference itself.

    >>> r = row("b", (3.0, 5.0, 4.0), (1.0, 2.0, 3.0))
    >>> r.difference, r.spread, round(r.chance, 4)
    (2.0, 1.0, 0.0742)
    """
    if reference is None:
        return Row(name, accuracies)
    differences = [a - b for a, b in zip(accuracies, reference, strict=True)]
    if len(differences) < 2:
        return Row(name, accuracies, differences[0])
    spread = stdev(differences)
    return Row(name, accuracies, mean(differences), spread, _p_value(mean(differences), spread, len(differences)))


def _p_value(difference: float, spread: float, n: int) -> float | None:
    """The two-sided p-value of a paired t-test with n pairs."""
    if spread < 1e-9:  # the differences are equal up to rounding: a t-test needs some spread
        return None
    from scipy.stats import t

    return float(2 * t.sf(abs(difference) / (spread / math.sqrt(n)), n - 1))


def cells_of(row: Row) -> tuple[str, str, str, str]:
    """A row as text: method, accuracy, difference, p."""
    accuracy = f"{row.mean:.1f}" if row.std is None else f"{row.mean:.1f} ± {row.std:.1f}"
    difference = "" if row.difference is None else f"{row.difference:+.1f}"
    if row.spread:
        difference += f" ± {row.spread:.1f}"
    return get_method(row.method).title, accuracy, difference, "" if row.chance is None else readable(row.chance)


def readable(chance: float) -> str:
    """A p-value as text.

    >>> readable(0.0421), readable(0.0002)
    ('0.042', '< 0.001')
    """
    return "< 0.001" if chance < 0.001 else f"{chance:.3f}"


def verdict(rows: Sequence[Row]) -> tuple[str, str]:
    """The result of a comparison, and how certain it is; two phrases."""
    best = max(rows, key=lambda r: r.mean)
    reference = get_method(rows[0].method).title
    title, n = get_method(best.method).title, len(best.accuracies)
    seeds = f"n = {n} seed{'s' if n > 1 else ''}"
    if len(rows) == 1:
        return f"{title} reaches {cells_of(best)[1]} % test accuracy", f"over {seeds}; name two methods to compare them"
    if best.difference is None:
        return f"No method beats {reference} here", f"over {seeds}"
    if best.chance is None or best.chance >= 0.05:  # a gain that may be chance is not a headline
        where = "on average" if n > 1 else "on this seed"
        gain = f"No certain difference: {where} {title} has {best.difference:.1f} points more than {reference}"
        sure = "this may be chance; try more seeds"
    else:
        gain, sure = f"{title} is {best.difference:.1f} points above {reference}", "unlikely to be chance"
    if best.chance is None:
        return gain, f"paired over {seeds}, without a p-value: {sure}"
    relation = readable(best.chance) if best.chance < 0.001 else f"= {readable(best.chance)}"
    return gain, f"paired over {seeds}, p {relation}: {sure}"


def sentence(rows: Sequence[Row]) -> str:
    """The verdict as one sentence."""
    return "{} ({}).".format(*verdict(rows))


def write_report(folder: Path, rows: Sequence[Row]) -> Path:
    """Write comparison.md for people and comparison.json for programs; returns the path of comparison.md."""
    plan = _plan(folder)
    recipe = run_folder.read_recipe(cells(folder)[0])
    info = run_folder.read_info(cells(folder)[0])
    lines = [
        f"# {recipe.name}: {', '.join(get_method(r.method).title for r in rows)}",
        "",
        f"Test accuracy (%) after {_rounds(recipe, rows)}, mean ± std over n = {len(plan['seeds'])} seeds "
        f"({', '.join(map(str, plan['seeds']))}), {info.precision}, fedbe {info.made_with['fedbe']}.",
        "",
        f"| method | accuracy | against {get_method(rows[0].method).title} | p (paired t-test) |",
        "|---|---|---|---|",
    ]
    best = max(rows, key=lambda r: r.mean).method
    for r in rows:
        shown = [f"**{c}**" if r.method == best and c else c for c in cells_of(r)]
        lines.append(f"| {' | '.join(shown)} |")
    lines += ["", sentence(rows), ""]
    write_json(folder / "comparison.json", [vars(r) for r in rows])
    write_atomic(folder / "comparison.md", "\n".join(lines).encode())
    return folder / "comparison.md"


def _rounds(recipe: Recipe, rows: Sequence[Row]) -> str:
    """The number of rounds as text, with the methods that have fewer."""
    rounds = {get_method(r.method).title: recipe.rounds(get_method(r.method)) for r in rows}
    most = max(rounds.values())
    fewer = ", ".join(f"{title}: {n}" for title, n in rounds.items() if n < most)
    return f"{most} rounds ({fewer})" if fewer else f"{most} rounds"


def _plan(folder: Path) -> Mapping[str, list]:  # type: ignore[type-arg]
    """The methods and seeds of a comparison."""
    try:
        plan: Mapping[str, list] = json.loads((folder / PLAN_FILE).read_text())  # type: ignore[type-arg]
        for part, kind in (("methods", str), ("seeds", int)):
            if not isinstance(plan[part], list) or not plan[part] or not all(type(v) is kind for v in plan[part]):
                raise ValueError(f"{PLAN_FILE} must list methods and seeds")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{folder} is not a comparison: {error}") from error
    return plan


def _cell(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name}-seed{seed}"


def _accuracy(cell: Path) -> float:
    info = run_folder.read_info(cell)
    if info.final is None:
        raise RunError(f"{cell} is not finished: resume it with `fedbe resume {shlex.quote(str(cell.parent))}`")
    return float(info.final["accuracy"])
