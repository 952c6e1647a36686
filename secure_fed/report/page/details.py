"""Sections to look things up in: clients, rounds, configuration, versions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

from secure_fed.learning.tasks.headline import scores, spoken
from secure_fed.report.formatting import counted, duration, listed, number, percent, rate, size
from secure_fed.report.page import plots
from secure_fed.report.page.markup import figure, figures, folded, paragraph, section, table
from secure_fed.report.page.masks import masked
from secure_fed.report.page.record import RunRecord


def clients(record: RunRecord) -> str:
    """The number of examples of each client, and the divergence of their labels."""
    if not record.clients:
        return ""
    sizes = sorted((examples for _, examples in record.clients), reverse=True)
    rows = ((name, number(examples)) for name, examples in record.clients)
    return section(
        "Clients",
        paragraph(_sizes(sizes)),
        figures(_size_bars(sizes), _label_skew(record)),
        folded("Every client by name", table(("client", "examples"), rows)),
    )


def rejected(record: RunRecord) -> str:
    """The clients whose update was left out, by round."""
    if not record.rejected:
        return ""
    return section(
        "Updates left out",
        paragraph(f"{_REFUSED if masked(record) else _NOT_FINITE} {_WENT_ON}"),
        table(("round", "clients"), ((round_number, listed(names)) for round_number, names in record.rejected)),
    )


def rounds(record: RunRecord) -> str:
    """Every measured number by round, for readers who cannot see the plots."""
    expected = ("clients (expected)", "up (expected)", "down (expected)")
    sent = expected if record.hides_cohort else ("clients", "up", "down")
    more = _more(record)
    names = scores(record.config.data.task, record.config.data.metric)
    head = ("round", *map(spoken, names), "test loss", "train loss", *sent, *more, "lr")
    rows = (
        (
            row["round"],
            *((percent if name == "accuracy" else number)(row.get(name)) for name in names),
            number(row.get("loss")),
            number(row.get("train_loss")),
            number(row.get("cohort")),
            size(row.get("bytes_up")),
            size(row.get("bytes_down")),
            *(say(row) for say in more.values()),
            rate(row.get("lr")),
        )
        for row in record.rounds
    )
    return section("Every round", folded("All rounds as a table", table(head, rows))) if record.rounds else ""


def _more(record: RunRecord) -> dict[str, Callable[[Mapping[str, Any]], str]]:
    """Further columns of the table of rounds. Time and survivors are missing where they are withheld."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {}
    if masked(record) and record.series("masked", "survivors"):
        columns["in the sum"] = lambda row: number(row["masked"].get("survivors"))
    if record.series("sketch_residual"):
        columns["lost by the sketch"] = lambda row: percent(row.get("sketch_residual"))
    if record.series("seconds"):
        columns["time"] = lambda row: duration(row.get("seconds"))
    return columns


def configuration(record: RunRecord) -> str:
    """Every setting of the run, its classes, and the software that ran it."""
    settings = (
        (f"{name}.{key}", value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False))
        for name, table in record.config.to_dict().items()
        for key, value in table.items()
    )
    labels = [str(label) for label in record.facts["label_names"]]
    versions: Mapping[str, Any] = record.facts.get("versions", {})
    return section(
        "Configuration",
        folded("Every setting", table(("setting", "value"), settings)),
        folded(counted(len(labels), "class", "classes"), paragraph(listed(labels))) if labels else "",
        folded("Versions", table(("package", "version"), versions.items())) if versions else "",
    )


def _sizes(sizes: list[int]) -> str:
    verb = "holds" if len(sizes) == 1 else "hold"
    held = f"{counted(len(sizes), 'client')} {verb} {number(sum(sizes))} examples"
    if sizes[0] == sizes[-1]:
        return f"{held}, {number(sizes[0])} each."
    middle = number(round(median(sizes)))
    return f"{held}: from {number(sizes[-1])} to {number(sizes[0])} each, median {middle}."


def _size_bars(sizes: list[int]) -> str:
    title = "Examples of each client"
    return figure(
        title,
        plots.bars(title, sizes, x_label="client, largest first", y_label="examples"),
        "Each bar is one client.",
    )


def _label_skew(record: RunRecord) -> str:
    divided = record.facts.get("partition", {})
    divergence = divided.get("jensen_shannon")
    if divergence is None:
        return ""
    title = "Label skew between clients"
    return figure(
        title,
        plots.scale(title, float(divergence), low="0: same mix of labels", high="1: no label in common"),
        f"Jensen-Shannon divergence between clients: {number(float(divergence))}"
        f" (split of the data: {divided.get('kind', record.config.data.partition)}).",
    )


_NOT_FINITE = "These updates contained numbers that are not finite."
_REFUSED = "What these clients sent did not follow the protocol of secure aggregation."
_WENT_ON = "The round continued with the other clients; nothing of these updates is in the model."
