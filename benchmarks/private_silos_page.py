"""The page of `private_silos.py`: accuracy by method and epsilon beside the head alone, and every tried rate."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from last_layer import SCALES
from private_silos_cells import EPSILONS, HEADS, METHODS, SEARCHED, Cell, rates
from scipy import stats

Found = Mapping[Cell, float]
_SHOWN = {"head alone": "classification layer alone"}  # a name in stored runs


def page(found: Found, commonest: Mapping[str, float]) -> str:
    parts = []
    for data, silos, head in sorted({(cell.data, cell.silos, cell.head) for cell in found}, key=_place):
        here = {cell: value for cell, value in found.items() if (cell.data, cell.silos) == (data, silos)}
        own, alone = (
            _Part({cell: value for cell, value in here.items() if cell.head == kind}, rates(silos))
            for kind in (head, "trained" if head == "frozen" else head)
        )
        if not own.methods:
            continue  # a search without runs so far
        parts.append(
            f"\n## {data}, {silos} silos, {head} head\n\n"
            f"The commonest label has {100 * commonest[data]:.1f} % of the test texts.\n\n"
            f"{own.accuracies(alone)}\n\nThe search, on other texts:\n\n{own.search()}\n"
        )
    return "".join(parts)


def _place(part: tuple[str, int, str]) -> tuple[int, bool, int, int]:
    """The order of the page: by data set, ten silos first, trained heads first."""
    data, silos, head = part
    return list(SCALES).index(data), silos != 10, silos, HEADS.index(head)


class _Part:
    """The runs of one data set, number of silos and kind of head. tried: the learning rates of its search."""

    def __init__(self, found: Found, tried: Sequence[float]) -> None:
        self._found, self._tried = found, tried

    @property
    def methods(self) -> list[str]:
        """The methods with runs of the table."""
        return [method for method in METHODS if any(self.seeds(method, epsilon) for epsilon in EPSILONS)]

    def accuracies(self, alone: _Part) -> str:
        """The table of accuracies. alone: runs that include the head alone."""
        head = alone.seeds("head alone", SEARCHED)
        lines = [["method", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS), "8 less inf", "over the head"]]
        for method in METHODS:
            by_epsilon = {epsilon: self.seeds(method, epsilon) for epsilon in EPSILONS}
            if any(by_epsilon.values()):
                private = by_epsilon[SEARCHED]
                over = "" if method == "head alone" else paired(private, head)
                means = (shown(each.values()) for each in by_epsilon.values())
                lines.append([named(method), *means, paired(private, by_epsilon[math.inf]), over])
        return table(lines)

    def search(self) -> str:
        tried = [(epsilon, rate) for epsilon in (math.inf, SEARCHED) for rate in self._tried]
        lines = [["method", *(f"epsilon {epsilon:g}, rate {rate:g}" for epsilon, rate in tried)]]
        for method in METHODS:
            found = [self._searched(method, epsilon).get(rate) for epsilon, rate in tried]
            if any(found):
                lines.append([named(method), *(shown([] if one is None else [one]) for one in found)])
        return table(lines)

    def seeds(self, method: str, epsilon: float) -> dict[int, float]:
        """The accuracies by seed, at the rate found by the search."""
        searched = self._searched(method, SEARCHED if math.isfinite(epsilon) else epsilon)
        best = max(searched, key=lambda rate: searched[rate], default=None)
        return {
            cell.seed: value
            for cell, value in self._found.items()
            if (cell.method, cell.epsilon, cell.rate) == (method, epsilon, best) and cell.seed >= 0
        }

    def _searched(self, method: str, epsilon: float) -> dict[float, float]:
        """The search's accuracies by rate."""
        return {
            cell.rate: value
            for cell, value in self._found.items()
            if (cell.method, cell.epsilon) == (method, epsilon) and cell.seed < 0 and cell.rate in self._tried
        }


def paired(one: Mapping[int, float], other: Mapping[int, float]) -> str:
    """The mean of `one` minus `other` over common seeds, with the 95 % interval by Student's t."""
    gaps = [100 * (one[seed] - other[seed]) for seed in sorted(one.keys() & other.keys())]
    if not gaps:
        return ""
    mean = f"{statistics.mean(gaps):+.1f}"
    if len(gaps) < 2:
        return f"{mean} (1 seed)"
    half = float(stats.t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{mean} ({statistics.mean(gaps) - half:+.1f} to {statistics.mean(gaps) + half:+.1f}, {len(gaps)} seeds)"


def shown(found: Iterable[float]) -> str:
    values = [100 * value for value in found]
    if not values:
        return ""
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def named(method: str) -> str:
    return _SHOWN.get(method, method if " " in method else f"`{method}`")


def table(lines: Sequence[Sequence[str]]) -> str:
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)
