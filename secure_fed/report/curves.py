"""Sections over the rounds: accuracy and loss, bytes, and the diagnostics that the run's settings request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from secure_fed.learning.tasks.headline import headline, scores, spoken
from secure_fed.report import markup
from secure_fed.report.formatting import byte_unit, counted, duration, listed, number, percent, rate, size
from secure_fed.report.markup import Series, figure, figures, paragraph, section
from secure_fed.report.masks import masked
from secure_fed.report.record import Points, RunRecord


def learning(record: RunRecord) -> str:
    """The task's scores, losses and, where measured, the headline metric of each client."""
    return section("Learning", figures(_accuracy(record), _loss(record), _clients_accuracy(record)))


def _accuracy(record: RunRecord) -> str:
    names = scores(record.config.data.task, record.config.data.metric)
    series = tuple(Series(spoken(name), record.series(name)) for name in names)
    courses = (
        _course(_capital(one.label), one.points, percent if name == "accuracy" else number)
        for name, one in zip(names, series, strict=True)
    )
    return figure(
        f"{_capital(series[0].label)} on the test examples",
        markup.lines(f"{series[0].label} and {series[1].label} by round", series, y_label="score", top=1),
        " ".join(courses),
    )


def _loss(record: RunRecord) -> str:
    series = (Series("train loss", record.series("train_loss")), Series("test loss", record.series("loss")))
    measured = [one for one in series if one.points]
    courses = [_course(one.label.capitalize(), one.points, number) for one in measured]
    kept = "" if len(measured) == len(series) or record.config.privacy.unit == "none" else _NO_TRAIN_LOSS
    return figure(
        "Loss",
        markup.lines(f"{' and '.join(one.label for one in measured)} by round", series, y_label="loss"),
        " ".join(courses) + kept,
    )


def _clients_accuracy(record: RunRecord) -> str:
    mean = Series("mean", record.series("clients_accuracy", "mean"))
    worst = Series("worst tenth", record.series("clients_accuracy", "worst_decile"))
    compared = spoken(headline(record.config.data.task))
    return figure(
        f"{_capital(compared)} of each client on its own examples",
        markup.lines(f"mean and worst-tenth {compared} by round", (mean, worst), y_label="score", top=1),
        "A gap between the two lines means that the model serves some clients worse than others.",
    )


def _course(name: str, points: Points, words: Callable[[float | None], str]) -> str:
    """The first and the last value, and the rounds whose value is not finite."""
    if not points:
        return ""
    (first, start), (last, end) = points[0], points[-1]
    if first == last:
        return f"{name}: {words(end)} in round {last}."
    gaps = [str(number) for number, value in points if not math.isfinite(value)]
    missing = f" (not finite, hence not drawn: {'round' if len(gaps) == 1 else 'rounds'} {listed(gaps)})"
    return f"{name}: {words(start)} in round {first}, {words(end)} in round {last}{missing if gaps else ''}."


def traffic(record: RunRecord) -> str:
    """Bytes of the serialised tensors in each direction, by round and in total."""
    up, down = record.series("bytes_up"), record.series("bytes_down")
    measured = _MASKED if masked(record) else _MEASURED
    return section(
        "What travelled",
        _sketch(record),
        figures(
            _bytes("Sent in each round", up, down, _EXPECTED if record.hides_cohort else measured),
            _bytes(
                "Sent in total",
                _running(up),
                _running(down),
                f"In the end {size(record.total('bytes_up'))} from clients to server and"
                f" {size(record.total('bytes_down'))} from server to clients.",
            ),
        ),
    )


def _bytes(title: str, up: Points, down: Points, caption: str) -> str:
    one, unit = byte_unit(max((value for _, value in up + down if math.isfinite(value)), default=0))
    series = (
        Series("from clients", tuple((number, value / one) for number, value in up)),
        Series("to clients", tuple((number, value / one) for number, value in down)),
    )
    return figure(title, markup.lines(f"{title.lower()}, by round", series, y_label=unit), caption)


def _running(points: Points) -> Points:
    return tuple(zip((number for number, _ in points), accumulate(value for _, value in points), strict=True))


def _sketch(record: RunRecord) -> str:
    """The share of the mean update that its sketch lost, where there was a sketch."""
    lost = record.series("sketch_residual")
    if not lost:
        return ""
    worst, most = max(lost, key=lambda point: point[1])
    noised = (
        ""
        if record.config.privacy.unit != "client"
        else " It is measured with the noise in both, so lost noise counts as well."
    )
    return paragraph(
        f"At most {percent(most)} of the mean update's norm was lost (round {worst}): clients sent sketches of their updates,"
        f" not the updates.{noised}"
    )


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
        markup.lines(
            f"{name}: {quantity} by round", shown, y_label=quantity if name == "variation" else _AXES[quantity]
        ),
        f"{caption} {_ends(measured)}",
    )


def _drift(record: RunRecord) -> str:
    series = (Series("mean", record.series("drift", "mean")), Series("worst", record.series("drift", "worst")))
    return figure(
        "Similarity of client models and the global model on the test examples",
        markup.lines("drift: centred kernel alignment by round", series, y_label="CKA", top=1),
        f"Centred kernel alignment of the logits before and after a client trained; 1 means equal. {_ends(series)}",
    )


def _aggregation(record: RunRecord) -> str:
    series = (
        Series("A and B apart", record.series("aggregation_error", "fedavg")),
        Series("products, truncated", record.series("aggregation_error", "fra")),
    )
    return figure(
        "What averaging would lose",
        markup.lines("aggregation error by round", series, y_label="share of the mean product"),
        "The share of the mean product B A that is lost: by averaging A and B separately, and by averaging the products and "
        f"truncating them to the rank. {_ends(series)}",
    )


def _ends(series: tuple[Series, ...] | list[Series]) -> str:
    """The last value of each series, in words."""
    return " ".join(
        f"{_capital(one.label)}: {rate(one.points[-1][1])} in round {number(one.points[-1][0])}."
        for one in series
        if one.points
    )


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


_MEASURED = "The serialised tensors of all clients of the round, in both directions."
_MASKED = (
    "Everything that secure aggregation sent: keys, shares, masked numbers, and the model on its way to the clients."
)
_EXPECTED = "Expected bytes: this page does not say how many clients took part."
_NO_TRAIN_LOSS = " No train loss is shown: it would be published without noise."
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
