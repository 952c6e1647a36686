"""The tables of `language_models.py`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from scipy import stats

from secure_fed.runs.roc import exact_rate

Line = dict[str, Any]
NAMED = {"federa": "`federa`, A frozen"}
HOW = {
    "pooled": "no federation: all rows in one place",
    "alone": "no federation: one silo alone",
    "silos": "eight silos",
}
_DRAWS = 4000


_ORDER = [*HOW, "fedlora", "ffa_lora", "federa", "fra_lora"]


def page(found: Sequence[Line]) -> str:
    found = sorted((line for line in found if line["how"] != "search"), key=_place)
    parts = []
    for data in dict.fromkeys(line["data"] for line in found):
        own = [line for line in found if line["data"] == data and line["how"] in HOW]
        if own:
            parts += [f"### {data}, eight silos", silos(own)]
    clients = [line for line in found if line["how"] == "clients"]
    if clients:
        parts += ["### dialogues, one conversation a client", silos(clients)]
    noise = [line for line in found if line["how"] == "noise"]
    if noise:
        parts += ["### The noise alone, by cohort", noised(noise)]
    return "\n\n".join(parts)


def _place(line: Line) -> tuple[Any, ...]:
    """Its row in a table: without a federation first, then by epsilon, and the methods in one order."""
    how = _ORDER.index(line["how"]) if line["how"] in HOW else len(HOW)
    return line["data"], how, line["cohort"], -float(line["epsilon"]), _ORDER.index(line["method"])


def silos(found: Sequence[Line]) -> str:
    """A row for each run, seeds together."""
    head = ["", "method", "epsilon", "seeds", "loss, from", "to", "right answers", "membership AUC", "exposure, once"]
    head += ["eight times", "sent by a party in a round", "CPU s", "MiB"]
    rows = []
    keys = dict.fromkeys((line["how"], line["method"], line["epsilon"], line["cohort"]) for line in found)
    for how, method, epsilon, cohort in keys:
        some = [
            line
            for line in found
            if (line["how"], line["method"], line["epsilon"], line["cohort"]) == (how, method, epsilon, cohort)
        ]
        rows.append(
            [
                HOW.get(how, f"cohort {cohort}"),
                NAMED.get(method, f"`{method}`"),
                "" if epsilon == "inf" else epsilon,
                str(len(some)),
                f"{mean(sum(line['before']) / sum(line['tokens']) for line in some):.3f}",
                change(some),
                right(some),
                membership(some),
                f"{mean(x for line in some for x in line['once']):.2f}",
                f"{mean(x for line in some for x in line['often']):.2f}",
                "" if how in ("pooled", "alone") else f"{mean(line['bytes up'] for line in some) / 1e6:.1f} MB",
                f"{mean(line['CPU seconds'] for line in some):.0f}",
                f"{max(line['MiB'] for line in some):.0f}",
            ]
        )
    return table(head, rows)


def change(some: Sequence[Line]) -> str:
    """The loss after training, with the interval over test rows: rows of all seeds are drawn again, with their tokens."""
    after, tokens = (np.concatenate([line[name] for line in some]) for name in ("after", "tokens"))
    drawn = np.random.default_rng(0).integers(len(after), size=(_DRAWS, len(after)))
    low, high = np.quantile(after[drawn].sum(1) / tokens[drawn].sum(1), (0.025, 0.975))
    return f"{after.sum() / tokens.sum():.3f} ({low:.3f} to {high:.3f})"


def right(some: Sequence[Line]) -> str:
    """The share of right answers, with Clopper and Pearson's interval."""
    answers = [one for line in some for one in line.get("right", ())]
    if not answers:
        return ""
    rate = exact_rate(sum(answers), len(answers))
    return f"{100 * rate.value:.0f} % ({100 * rate.low:.0f} to {100 * rate.high:.0f})"


def membership(some: Sequence[Line]) -> str:
    """The AUC: with the interval of a single run, or the mean of several with Student's t."""
    if len(some) == 1:
        low, high = some[0]["auc interval"]
        return f"{some[0]['auc']:.2f} ({low:.2f} to {high:.2f})"
    each = [line["auc"] for line in some]
    half = float(stats.t.ppf(0.975, len(each) - 1)) * statistics.stdev(each) / math.sqrt(len(each))
    return f"{mean(each):.2f} ({mean(each) - half:.2f} to {mean(each) + half:.2f})"


def noised(found: Sequence[Line]) -> str:
    """How much the noise of a whole run raises the loss of the untrained model, by method, epsilon and cohort."""
    cohorts = sorted({line["cohort"] for line in found})
    rows = []
    keys = dict.fromkeys((line["method"], line["epsilon"]) for line in found)
    for method, epsilon in sorted(keys, key=lambda key: _ORDER.index(key[0])):
        by_cohort = {
            line["cohort"]: line["noise"] for line in found if (line["method"], line["epsilon"]) == (method, epsilon)
        }
        raised = [
            f"{by_cohort[one]['noised'] - by_cohort[one]['start']:+.3f}" if one in by_cohort else "" for one in cohorts
        ]
        rows.append([NAMED.get(method, f"`{method}`"), epsilon, *raised])
    return table(["method", "epsilon", *(f"cohort {one}" for one in cohorts)], rows)


def mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))
