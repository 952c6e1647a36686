"""The tables of `claims.py`: each claim's differences with their intervals, and the runs behind them.

Two configurations are compared seed by seed, since a seed draws the same partition for both. Intervals are Student's t of the
differences at 95 %, without correction for their number: one interval of twenty is expected to miss.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from claims_made import CLAIMS, SEARCHED_ON, TERMS, Claim, Order, Scale, Widening
from scipy import stats

Run = dict[str, Any]
Verdict = tuple[str, ...]  # the cells under _HEADS


@dataclass(frozen=True)
class Arms:
    """The runs of one claim by configuration and seed."""

    runs: dict[str, dict[int, Run]]

    def differences(self, better: str, worse: str, measure: str = "accuracy") -> dict[int, float]:
        """Better minus worse in points, by seed, over the seeds that both have."""
        left, right = self.runs.get(better, {}), self.runs.get(worse, {})
        return {seed: 100 * (left[seed][measure] - right[seed][measure]) for seed in sorted(left.keys() & right.keys())}

    def have(self, *arms: str) -> bool:
        return all(arm in self.runs for arm in arms)

    def mean(self, arm: str, measure: str) -> float:
        return fmean(run[measure] for run in self.runs[arm].values())


def tables(runs: Sequence[Run], sizes: Mapping[str, Scale]) -> str:
    """The tables in Markdown. sizes: by name, in the order of the page."""
    made = {(claim.name, size): Arms(_by_arm(runs, claim.name, size)) for claim in CLAIMS for size in sizes}
    parts = [_short(made)]
    for claim in CLAIMS:
        parts += [f"## {claim.name}\n\n{claim.says} {claim.paper}."]
        parts += [f"**Other terms than the paper's.** {TERMS[claim.name]}"]
        for size in sizes:
            arms = made[claim.name, size]
            if arms.runs:
                found = _verdicts(claim, arms)
                compared = [_table(_HEADS, found)] if found else []
                parts += [
                    f"### {claim.name}, {size}",
                    *compared,
                    _configurations(claim, arms),
                    *_rates(runs, claim, size),
                ]
    return "\n\n".join(parts)


_HEADS = ("compared", "measured", "95 % interval", "paper", "detectable", "verdict")
_FEW = "not decided (fewer than three seeds)"
_UNLIKE = "not decided on the paper's terms"
_CLAIMED, _OWN = ("**holds**", "**contradicted**"), ("**above zero**", "**below zero**")


def _verdicts(claim: Claim, arms: Arms) -> list[Verdict]:
    """A row for each comparison whose configurations have runs."""
    orders = [
        order
        for order in claim.orders
        if arms.have(*(["fedlora"] if order.measure == "diagnostic" else [order.better, order.worse]))
    ]
    widening = [one for one in claim.widening if arms.have(*one.better, *one.worse)]
    return [*(_judged(order, arms) for order in orders), *(_widened(one, arms) for one in widening)]


def _short(made: Mapping[tuple[str, str], Arms]) -> str:
    """Every comparison once, at the largest size with at least three seeds. made: by claim and size, in order of size."""
    rows = []
    for claim in CLAIMS:
        last: dict[str, tuple[str, ...]] = {}
        for (name, size), arms in made.items():
            if name == claim.name and arms.runs:
                last |= {row[0]: (*row, size) for row in _verdicts(claim, arms) if row[-1] != _FEW}
        rows += [(claim.name, *row) for row in last.values()]
    return "## In short\n\n" + _table(("claim", *_HEADS, "runs"), rows)


def _by_arm(runs: Sequence[Run], claim: str, size: str) -> dict[str, dict[int, Run]]:
    found: dict[str, dict[int, Run]] = {}
    for run in runs:
        own_rate = run.get("rate", 1.0) == 1 and run["seed"] != SEARCHED_ON
        if (run["claim"], run["size"]) == (claim, size) and own_rate:
            found.setdefault(run["arm"], {})[run["seed"]] = run
    return found


def _judged(order: Order, arms: Arms) -> Verdict:
    return _on_its_terms(order, _measured(order, arms))


def _on_its_terms(made: Order | Widening, row: Verdict) -> Verdict:
    """The row, without a verdict on a comparison that differs from the paper's: the difference takes its place."""
    return (*row[:-1], f"{_UNLIKE}: {made.unlike}") if made.unlike and row[-1] != _FEW else row


def _measured(order: Order, arms: Arms) -> Verdict:
    if order.measure == "bytes":
        return _bytes(order, arms)
    if order.measure == "diagnostic":
        return _diagnosed(order, arms)
    when = " at the first evaluation" if order.measure == "early" else ""
    measure = "early" if order.measure == "early" else "accuracy"
    found = arms.differences(order.better, order.worse, measure)
    return f"{order.better} over {order.worse}{when}", *_interval(list(found.values()), order)


def _widened(widening: Widening, arms: Arms) -> Verdict:
    """The lead at the second setting minus the lead at the first."""
    mild, strong = (
        arms.differences(better, worse) for better, worse in zip(widening.better, widening.worse, strict=True)
    )
    grown = [strong[seed] - mild[seed] for seed in sorted(strong.keys() & mild.keys())]
    text = f"lead of {widening.better[1]} over {widening.worse[1]} minus lead of {widening.better[0]} over {widening.worse[0]}"
    return _on_its_terms(widening, (text, *_interval(grown, widening)))


def _interval(differences: Sequence[float], made: Order | Widening) -> Verdict:
    """The cells under `_HEADS` from the second on."""
    stated = made.stated
    said = "" if stated is None else f"{stated:+.1f}"
    if len(differences) < 3:
        return "", "", said, "", _FEW
    seen, error = fmean(differences), stdev(differences) / math.sqrt(len(differences))
    student = stats.t(len(differences) - 1)
    reach = float(student.ppf(0.975)) * error
    detectable = reach + float(student.ppf(0.8)) * error
    return (
        f"{seen:+.1f}",
        f"{seen - reach:+.1f} to {seen + reach:+.1f}",
        said,
        f"{detectable:.1f}",
        _verdict(seen, reach, stated, _OWN if made.own else _CLAIMED),
    )


def _verdict(seen: float, reach: float, stated: float | None, words: tuple[str, str]) -> str:
    """words: for an interval above zero, and below."""
    excluded = stated is not None and seen + reach < stated
    if abs(seen) > reach:
        word = words[0] if seen > 0 else words[1]
        return f"{word}, by less than in the paper" if seen > 0 and excluded else word
    return "not decided; less than in the paper" if excluded else "not decided"


def _bytes(order: Order, arms: Arms) -> Verdict:
    sent: Callable[[str], float] = lambda arm: arms.mean(arm, "bytes_up") + arms.mean(arm, "bytes_down")  # noqa: E731
    ratio = sent(order.better) / sent(order.worse)
    verdict = _CLAIMED[0 if ratio < order.share else 1] + ": settings alone determine it"
    return f"bytes of {order.better} / {order.worse}", f"{ratio:.0%}", "", f"below {order.share:.0%}", "", verdict


def _diagnosed(order: Order, arms: Arms) -> Verdict:
    """Two errors of the runs that average factors: of that average, and of the best rank-r approximation of the products."""
    runs = list(arms.runs["fedlora"].values())
    better, worse = ([run[name] for run in runs] for name in (order.better, order.worse))
    wins = sum(map(float.__lt__, better, worse))
    verdict = _CLAIMED[0] if wins == len(runs) else _CLAIMED[1] if wins == 0 else "not decided"
    seen = f"{fmean(better):.3f} against {fmean(worse):.3f}"
    return f"{order.better} below {order.worse}", seen, f"{wins} of {len(runs)} seeds", "", "", verdict


def _configurations(claim: Claim, arms: Arms) -> str:
    heads = ("configuration", "seeds", "accuracy", "commonest label", "up", "down")
    rows = []
    for arm in claim.arms:
        runs = list(arms.runs.get(arm, {}).values())
        if not runs:
            continue
        accuracies = [100 * run["accuracy"] for run in runs]
        common = 100 * runs[0]["commonest"]
        spread = f" ± {stdev(accuracies):.1f}" if len(runs) > 1 else ""
        warning = "" if fmean(accuracies) > common else " (no better than the commonest label)"
        sizes = (f"{arms.mean(arm, name) / 1e6:.2f} MB" for name in ("bytes_up", "bytes_down"))
        rows.append((arm, str(len(runs)), f"{fmean(accuracies):.1f}{spread}{warning}", f"{common:.1f}", *sizes))
    return _table(heads, rows)


def _rates(runs: Sequence[Run], claim: Claim, size: str) -> list[str]:
    """The accuracies at multiples of a configuration's learning rate, if others than its own were tried."""
    found = {
        (run["arm"], run.get("rate", 1.0)): 100 * run["accuracy"]
        for run in runs
        if (run["claim"], run["size"], run["seed"]) == (claim.name, size, SEARCHED_ON)
    }
    tried = sorted({rate for _, rate in found})
    if len(tried) < 2:
        return []
    cells = {arm: [f"{found[arm, rate]:.1f}" if (arm, rate) in found else "" for rate in tried] for arm in claim.arms}
    rows = [(arm, *row) for arm, row in cells.items() if any(row)]
    heads = ("configuration", *(f"learning rate x {rate:.2g}" for rate in tried))
    return [f"Other learning rates, seed {SEARCHED_ON}, which no comparison uses:", _table(heads, rows)]


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    line = lambda cells: "| " + " | ".join(cells) + " |"  # noqa: E731
    return "\n".join([line(heads), line(["---"] * len(heads)), *map(line, rows)])
