"""Curves over the rounds: accuracy, loss, bytes."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import accumulate

from secure_fed.learning.tasks.headline import headline, scores, spoken
from secure_fed.report.formatting import byte_unit, listed, number, percent, size
from secure_fed.report.page import plots
from secure_fed.report.page.markup import figure, figures, paragraph, section
from secure_fed.report.page.masks import masked
from secure_fed.report.page.plots import Series
from secure_fed.report.page.record import Points, RunRecord


def learning(record: RunRecord) -> str:
    """The task's scores, losses and, where measured, the headline metric of each client."""
    return section("Learning", figures(_accuracy(record), _loss(record), _clients_accuracy(record)))


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


def _accuracy(record: RunRecord) -> str:
    names = scores(record.config.data.task, record.config.data.metric)
    series = tuple(Series(spoken(name), record.series(name)) for name in names)
    courses = (
        _course(_capital(one.label), one.points, percent if name == "accuracy" else number)
        for name, one in zip(names, series, strict=True)
    )
    return figure(
        f"{_capital(series[0].label)} on the test examples",
        plots.lines(f"{series[0].label} and {series[1].label} by round", series, y_label="score", top=1),
        " ".join(courses),
    )


def _loss(record: RunRecord) -> str:
    series = (Series("train loss", record.series("train_loss")), Series("test loss", record.series("loss")))
    measured = [one for one in series if one.points]
    courses = [_course(one.label.capitalize(), one.points, number) for one in measured]
    kept = "" if len(measured) == len(series) or record.config.privacy.unit == "none" else _NO_TRAIN_LOSS
    return figure(
        "Loss",
        plots.lines(f"{' and '.join(one.label for one in measured)} by round", series, y_label="loss"),
        " ".join(courses) + kept,
    )


def _clients_accuracy(record: RunRecord) -> str:
    mean = Series("mean", record.series("clients_accuracy", "mean"))
    worst = Series("worst tenth", record.series("clients_accuracy", "worst_decile"))
    compared = spoken(headline(record.config.data.task))
    return figure(
        f"{_capital(compared)} of each client on its own examples",
        plots.lines(f"mean and worst-tenth {compared} by round", (mean, worst), y_label="score", top=1),
        "A gap between the two lines means that the model serves some clients worse than others.",
    )


def _bytes(title: str, up: Points, down: Points, caption: str) -> str:
    one, unit = byte_unit(max((value for _, value in up + down if math.isfinite(value)), default=0))
    series = (
        Series("from clients", tuple((number, value / one) for number, value in up)),
        Series("to clients", tuple((number, value / one) for number, value in down)),
    )
    return figure(title, plots.lines(f"{title.lower()}, by round", series, y_label=unit), caption)


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


def _running(points: Points) -> Points:
    return tuple(zip((number for number, _ in points), accumulate(value for _, value in points), strict=True))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]


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


_MEASURED = "The serialised tensors of all clients of the round, in both directions."
_MASKED = (
    "Everything that secure aggregation sent: keys, shares, masked numbers, and the model on its way to the clients."
)
_EXPECTED = "Expected bytes: readers do not learn how many clients took part."
_NO_TRAIN_LOSS = " No train loss is shown: it would be published without noise."
