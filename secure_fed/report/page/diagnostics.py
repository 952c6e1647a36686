"""The diagnostics that the run's settings request, beside accuracy and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fed.learning.tasks.headline import headline, spoken
from secure_fed.report.formatting import counted, duration, number, percent, rate, size
from secure_fed.report.page import plots
from secure_fed.report.page.markup import figure, figures, paragraph, section
from secure_fed.report.page.plots import Series
from secure_fed.report.page.record import Points, RunRecord


def diagnostics(record: RunRecord) -> str:
    """The papers' diagnostics, the rounds to a target, and the time over a line."""
    return section(
        "Diagnostics",
        _target(record),
        _time(record),
        figures(
            _drawn(record, "variation", "magnitude", _FACTORS, "Change of the global weights in length", _LENGTH),
            _drawn(record, "variation", "direction", _FACTORS, "Change of the global weights in direction", _TURN),
            _drawn(
                record,
                "discrepancy",
                "magnitude",
                {"": "clients"},
                "Distance of the clients' weights from the global ones",
                _AWAY,
            ),
            _drawn(record, "discrepancy", "direction", {"": "clients"}, "Direction of the clients' weights", _COSINE),
            _drift(record),
            _aggregation(record),
        ),
    )


def _target(record: RunRecord) -> str:
    target = record.config.evaluation.target_accuracy
    if target is None or record.withholds_test:
        return ""
    metric = headline(record.config.data.task)
    aim = f"accuracy of {percent(target)}" if metric == "accuracy" else f"{spoken(metric)} of {number(target)}"
    for reached, value in record.series(metric):
        if value >= target:
            upto = [row for row in record.rounds if row["round"] <= reached]
            up, down = (size(sum(row[name] for row in upto)) for name in ("bytes_up", "bytes_down"))
            sent = "are expected to have travelled" if record.hides_cohort else "travelled"
            return paragraph(
                f"The target {aim} was reached after {counted(reached, 'round')}. Until then "
                f"{up} {sent} from the clients and {down} to them."
            )
    return paragraph(f"The target {aim} was not reached in {counted(len(record.rounds), 'round')}.")


def _time(record: RunRecord) -> str:
    line = record.config.evaluation.bandwidth
    if line is None or not record.rounds:
        return ""
    found: Mapping[str, Any] = ((record.result or {}).get("diagnostics") or {}).get("bandwidth") or {}
    sending = duration(record.total("transfer_seconds"))
    sentence = f"Over lines of {rate(line)} MB/s, clients would spend {sending} sending and receiving"
    compute = found.get("compute_seconds")
    if compute is None:
        return paragraph(f"{sentence}.")
    return paragraph(
        f"{sentence}, and {duration(compute)} computing if they are as fast as this machine and work at the same time: "
        f"{duration(found.get('seconds'))} together."
    )


def _drawn(record: RunRecord, name: str, quantity: str, endings: Mapping[str, str], title: str, caption: str) -> str:
    """One quantity of a diagnostic, with at most two lines."""
    found = {label: record.series(name, quantity + ending) for ending, label in endings.items()}
    measured = [Series(label, points) for label, points in found.items() if points]
    factors = [one for one in measured if one.label != _PRODUCT]
    shown = factors if len(factors) == 2 else measured[:2]
    return figure(
        title,
        plots.lines(
            f"{name}: {quantity} by round", shown, y_label=quantity if name == "variation" else _AXES[quantity]
        ),
        f"{caption} {_ends(measured)}",
    )


def _drift(record: RunRecord) -> str:
    series = (Series("mean", record.series("drift", "mean")), Series("worst", record.series("drift", "worst")))
    return figure(
        "Similarity of client models and the global model on the test examples",
        plots.lines("drift: centred kernel alignment by round", series, y_label="CKA", top=1),
        f"Centred kernel alignment of the logits before and after a client trained; 1 means equal. {_ends(series)}",
    )


def _aggregation(record: RunRecord) -> str:
    series = (
        Series("A and B apart", record.series("aggregation_error", "fedavg")),
        Series("products, truncated", record.series("aggregation_error", "fra")),
    )
    return figure(
        "What averaging would lose",
        plots.lines("aggregation error by round", series, y_label="share of the mean product"),
        "The share of the mean product B A that is lost: by averaging A and B separately, and by averaging the products and "
        f"truncating them to the rank. {_ends(series)}",
    )


def _ends(series: tuple[Series, ...] | list[Series]) -> str:
    """The last value of each series, in words."""
    return " ".join(f"{one.label[0].upper()}{one.label[1:]}: {_short(one.points)}." for one in series if one.points)


def _short(points: Points) -> str:
    last, value = points[-1]
    return f"{rate(value)} in round {number(last)}"


_PRODUCT = "product"
_FACTORS = {"": _PRODUCT, "_a": "factor A", "_b": "factor B"}
_AXES = {"magnitude": "distance", "direction": "cosine"}
_LENGTH = "Between two rounds: the mean change of a column's length."
_TURN = "Between two rounds: one minus the cosine between a column before and after, on average; 1 is a right angle."
_AWAY = (
    "The distance between a client's weights after training and those it received, averaged over the round's clients."
)
_COSINE = (
    "The cosine between a client's weights after training and those it received, on average; 1 is the same direction."
)
