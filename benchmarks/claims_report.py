"""What `claims.py` found, as a page: a verdict a claim, and the table it stands on."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from claims_made import Claim, Order, Scale, Widening

from secure_fed.commands.comparison import Row
from secure_fed.commands.comparison.rows import Spread
from secure_fed.commands.comparison.tables import markdown


@dataclass(frozen=True)
class Outcome:
    """A claim, the row of every configuration, and the folder of the runs."""

    claim: Claim
    rows: dict[str, Row]
    folder: Path


def page(outcomes: Sequence[Outcome], scale: Scale, seeds: Sequence[int], machine: str, options: str) -> str:
    """Markdown that ends with a newline."""
    command = f"python benchmarks/claims.py DATA --seeds {','.join(map(str, seeds))} {options}".rstrip()
    lines = [
        "# Claims of the papers, tried",
        "",
        f"Written by `{command}` on: {machine}.",
        "",
        f"All-MiniLM-L6-v2, {_size(scale.train)} training texts of at most {scale.length} tokens, {scale.rounds} rounds, "
        f"{len(seeds)} seeds. An order holds, or is contradicted, where the means are apart by more than twice the standard "
        "error of their difference; else it is undecided. So few seeds and steps can show a large difference only, and what is "
        "undecided here may hold in the papers' settings, which are longer and of larger models. Learning rates are a first "
        "guess for each method and were not tuned. Times are of comparisons that may have run "
        "side by side, and are no measurement.",
        "",
        "What privacy costs FedLoRA, FFA and FRA is in [private_utility.md](private_utility.md): that takes thousands of "
        "clients.",
        "",
        "| claim | of | seen |",
        "|---|---|---|",
    ]
    for outcome in outcomes:
        found = "<br>".join(f"{text}: **{verdict}** ({detail})" for text, verdict, detail in _verdicts(outcome))
        lines.append(f"| {outcome.claim.says} | {outcome.claim.paper} | {found} |")
    for outcome in outcomes:
        lines += ["", f"## {outcome.claim.name}", "", f"{outcome.claim.data}. {outcome.claim.says}", ""]
        table = markdown(list(outcome.rows.values())).splitlines()
        lines += [line for line in table if line.startswith("|")]
    return "\n".join(lines) + "\n"


def _size(rows: int | None) -> str:
    return "all" if rows is None else str(rows)


def _verdicts(outcome: Outcome) -> list[tuple[str, str, str]]:
    found = [_judged(order, outcome) for order in outcome.claim.orders]
    return found + [_widened(widening, outcome.rows) for widening in outcome.claim.widening]


def _judged(order: Order, outcome: Outcome) -> tuple[str, str, str]:
    rows = outcome.rows
    if order.measure == "diagnostic":
        return _diagnosed(order, outcome)
    better, worse = rows[order.better], rows[order.worse]
    if order.measure == "bytes":
        ratio = (better.bytes_up + better.bytes_down) / (worse.bytes_up + worse.bytes_down)
        verdict = "holds" if ratio < order.share else "contradicted"
        return f"{order.better} sends less than {order.share:.0%} of {order.worse}", verdict, f"{ratio:.0%}"
    left, right = (_measured(row, order.measure) for row in (better, worse))
    when = " at the first evaluation" if order.measure == "early" else ""
    detail = f"{left.mean:.1%} against {right.mean:.1%}"
    return (
        f"{order.better} over {order.worse}{when}",
        _verdict(left.mean - right.mean, _error(left, right, better)),
        detail,
    )


def _measured(row: Row, measure: str) -> Spread:
    spread = row.curve[0].accuracy if measure == "early" else row.accuracy
    if spread is None:
        raise ValueError(f"{row.name} measured no accuracy")
    return spread


def _diagnosed(order: Order, outcome: Outcome) -> tuple[str, str, str]:
    """Of the run that averages factors: what that loses, and what keeping the best rank-r part of products would."""
    name = next(arm for arm, settings in outcome.claim.arms.items() if settings["method.name"] == "fedlora")
    errors: dict[str, list[float]] = {"error_fra": [], "error_fedavg": []}
    for seed in outcome.rows[name].seeds:
        lines = (outcome.folder / name / f"seed-{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        told = [json.loads(line)["aggregation_error"] for line in lines]
        errors["error_fra"].append(fmean(one["fra"] for one in told))
        errors["error_fedavg"].append(fmean(one["fedavg"] for one in told))
    better, worse = fmean(errors[order.better]), fmean(errors[order.worse])
    verdict = "holds" if all(map(float.__lt__, errors[order.better], errors[order.worse])) else "contradicted"
    return f"{order.better} below {order.worse}", verdict, f"{better:.3f} against {worse:.3f}, relative"


def _widened(widening: Widening, rows: dict[str, Row]) -> tuple[str, str, str]:
    leads, errors = [], []
    for better, worse in zip(widening.better, widening.worse, strict=True):
        left, right = (_measured(rows[name], "accuracy") for name in (better, worse))
        leads.append(left.mean - right.mean)
        errors.append(_error(left, right, rows[better]))
    text = f"the lead of {widening.better[1]} over {widening.worse[1]} is wider than with less skew"
    detail = f"from {100 * leads[0]:+.1f} to {100 * leads[1]:+.1f} points"
    return text, _verdict(leads[1] - leads[0], math.hypot(*errors)), detail


def _error(left: Spread, right: Spread, row: Row) -> float:
    """The standard error of the difference of two means."""
    return math.hypot(left.deviation or 0.0, right.deviation or 0.0) / math.sqrt(len(row.seeds))


def _verdict(lead: float, error: float) -> str:
    if abs(lead) <= 2 * error:
        return "undecided"
    return "holds" if lead > 0 else "contradicted"
