"""The table of results: mean ± std, n, and the difference to the first method, paired by seed, with its p-value."""

from dataclasses import dataclass, replace
from statistics import mean

from fedbe.analysis.runs import Run, RunGroup
from fedbe.experiment import comparison
from fedbe.report.chart import Table


@dataclass(frozen=True)
class MethodResult:
    """The finished runs of one method.

    Attributes:
        title: The method's name for people.
        accuracies: Final test accuracy in percent by seed.
        row: Mean, spread and the paired difference to the first method; None without a finished run.
        paired: Number of seeds that the first method has too.
        unfinished: The runs that are not in the numbers.
    """

    title: str
    accuracies: dict[int, float]
    row: comparison.Row | None
    paired: int
    unfinished: tuple[Run, ...]

    def mean_over(self, seeds: list[int]) -> float:
        """Mean accuracy over some of the seeds."""
        return mean(self.accuracies[seed] for seed in seeds)


def method_results(group: RunGroup) -> list[MethodResult]:
    """A result for each method, from finished runs only: the accuracy of an unfinished run is not a result."""
    first = next(iter(group.methods))
    reference = _final_accuracies(group.of(first))
    return [_method_result(group, method, {} if method == first else reference) for method in group.methods]


def _method_result(group: RunGroup, method: str, reference: dict[int, float]) -> MethodResult:
    accuracies = _final_accuracies(group.of(method))
    shared = [seed for seed in accuracies if seed in reference]
    row = comparison.row(method, tuple(accuracies.values()), None) if accuracies else None
    if shared:
        paired = comparison.row(method, tuple(accuracies[s] for s in shared), tuple(reference[s] for s in shared))
        row = replace(paired, accuracies=tuple(accuracies.values()))
    unfinished = tuple(run for run in group.of(method) if not run.finished)
    return MethodResult(group.methods[method], accuracies, row, len(shared), unfinished)


def _final_accuracies(runs: list[Run]) -> dict[int, float]:
    return {r.info.seed: 100 * float(r.info.final["accuracy"]) for r in runs if r.info.final is not None}


def common_seeds(results: list[MethodResult]) -> list[int]:
    """The seeds that all methods with a result have: only means over these can be compared."""
    seeds = [r.accuracies.keys() for r in results if r.accuracies]
    return [seed for seed in seeds[0] if all(seed in others for others in seeds)] if seeds else []


def best(results: list[MethodResult]) -> MethodResult | None:
    """The method with the highest mean over the common seeds; None if there are no such seeds."""
    seeds = common_seeds(results)
    if not seeds:
        return None
    return max((r for r in results if r.accuracies), key=lambda r: r.mean_over(seeds))


def table(group: RunGroup) -> Table:
    """The results as text; the best method is bold."""
    results = method_results(group)
    accuracy = ("Method", "Test accuracy, %", "n", "Seeds")
    if len(results) == 1:
        return Table(accuracy, (_accuracy_cells(results[0]),))
    columns = (*accuracy, f"Difference to {results[0].title}, points", "Paired n", "p")
    rows = tuple((*_accuracy_cells(r), *_difference_cells(r)) for r in results)
    comparable = len([r for r in results if r.row]) > 1
    winner = best(results)
    return Table(columns, rows, tuple(i for i, r in enumerate(results) if comparable and r is winner))


def _accuracy_cells(result: MethodResult) -> tuple[str, ...]:
    accuracy = "–" if result.row is None else comparison.cells_of(result.row)[1]
    seeds = [", ".join(map(str, result.accuracies))] if result.accuracies else []
    if result.unfinished:
        seeds.append(f"unfinished: {', '.join(str(run.info.seed) for run in result.unfinished)}")
    return result.title, accuracy, str(len(result.accuracies)), "; ".join(seeds) or "–"


def _difference_cells(result: MethodResult) -> tuple[str, ...]:
    if result.row is None:
        return "–", "–", "–"
    *_, difference, p = comparison.cells_of(result.row)
    return difference or "–", str(result.paired or "–"), p or "–"


def finding(group: RunGroup) -> tuple[str, str]:
    """A headline for the results, and a sentence that says how certain it is."""
    results = method_results(group)
    if group.unfinished:
        return f"Unfinished: {_progress(group)}", "The numbers may still change. `fedbe resume` continues the runs."
    winner = best(results)
    if winner is None or winner.row is None:
        return "The methods have no seed in common", "Their means are over different seeds and cannot be compared."
    if len(results) == 1:
        return _single_finding(winner, winner.row)
    if all(r.accuracies.keys() == winner.accuracies.keys() for r in results):
        headline, certainty = comparison.verdict([r.row for r in results if r.row is not None])
        return headline, f"{certainty[0].upper()}{certainty[1:]}."
    seeds = common_seeds(results)
    names = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}"
    headline = (
        f"{winner.title} has the highest accuracy on {names}, {winner.mean_over(seeds):.1f} %: this may be chance"
    )
    return (
        headline,
        "The methods have different seeds. Only the seeds that all methods have are compared, without a test.",
    )


def _single_finding(result: MethodResult, row: comparison.Row) -> tuple[str, str]:
    n = len(result.accuracies)
    certainty = (
        "One seed, so there is no standard deviation." if n == 1 else f"Mean ± standard deviation, n = {n} seeds."
    )
    return f"{result.title} reaches {comparison.cells_of(row)[1]} % test accuracy", certainty


def _progress(group: RunGroup) -> str:
    unfinished = group.unfinished
    if len(group.runs) == 1:
        return f"{unfinished[0].title} has done {len(unfinished[0].records)} of {unfinished[0].rounds} rounds"
    return f"{len(group.runs) - len(unfinished)} of {len(group.runs)} runs are finished"
