"""`secure-fed train --dry-run`: what a run would read, guarantee, send and need, without a step of training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LARGE = 10  # classes, of which so many are printed


def show(found: Mapping[str, Any]) -> None:
    """The facts as a table."""
    from rich.table import Table

    from secure_fed.report.terminal import PlainConsole

    table = Table(
        show_header=False,
        title=f"{found['method']}: {found['model']}, a dry run: nothing was trained, written or reserved",
        title_style="bold",
    )
    for row in (*_data(found["data"]), *_privacy(found["privacy"]), *_traffic(found), *_memory(found["memory"])):
        table.add_row(*row)
    console = PlainConsole()
    console.print(table)
    console.print(
        "Counts of rows have no noise: they are for the owner of the data. Memory follows from shapes; gaps in an allocator's "
        "memory and scratch space within an operation come on top. Trials of the model, which a private run makes before it "
        "reserves its budget, were not made."
    )


def _data(data: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    units = sorted(data["units"])
    middle = f", {units[0]:,} to {units[-1]:,} each, {units[len(units) // 2]:,} in the middle" if len(units) > 1 else ""
    yield "clients", f"{data['clients']:,}; {data['clients_without_rows']:,} without rows"
    unit = {"none": "rows", "client": "rows", "example": "rows", "group": "persons"}[data["unit"]]
    yield unit, f"{sum(units):,}{middle}"
    if labels := data["labels"]:
        most = sorted(labels.items(), key=lambda entry: -entry[1])
        listed = ", ".join(f"{name} {count:,}" for name, count in most[:_LARGE])
        yield "labels", listed + (f", and {len(most) - _LARGE} more" if len(most) > _LARGE else "")
    if tokens := data["tokens"]:
        yield "tokens a row", f"{tokens['mean']:.1f} in the mean, {tokens['longest']:,} at most"
    cut = "lose turns to" if data["task"] == "chat" else "reach"
    yield "test rows", f"{data['test_rows']:,} ({data['test_from']}); {data['empty_test_rows']:,} of them empty"
    yield (
        "cut or not learned",
        (
            f"{data['rows_at_the_limit']:,} rows {cut} model.max_length, {data['rows_left_out']:,} are left out for want of "
            f"room, {data['rows_with_nothing_to_learn']:,} have no token to learn, {data['held_out_for_an_audit']:,} units are "
            "held out for an audit"
        ),
    )
    if data["warning"]:
        yield "warning", data["warning"]


def _privacy(privacy: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    if privacy is None:
        yield "guarantee", "none: privacy.unit is 'none'"
        return
    for sentence in privacy["words"]:
        name, _, rest = sentence.partition(": ")
        yield name, rest
    if privacy["releases"] < privacy["releases_planned"]:
        yield "shortened", f"the ledger has room for {privacy['releases']} of {privacy['releases_planned']} releases"


def _traffic(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from secure_fed.report.formatting import size

    sent = found["traffic"]
    up, down = size(sent["bytes_up"]), size(sent["bytes_down"])
    yield "a round", f"{sent['cohort']:g} clients expected; {up} up, {down} down, all of them together"
    yield "rounds", f"{sent['rounds']:,}"
    least = found["seconds_a_round_at_least"]
    yield (
        "time of a round",
        "not known" if least is None else f"at least {least:.3g} s: the products alone, at this speed",
    )
    yield "checkpoint on disk", size(found["checkpoint_bytes"])


def _memory(memory: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    from secure_fed.report.formatting import size

    yield f"memory ({memory['device']})", f"{size(memory['peak'])} at the peak, of {size(memory['of_device'])}"
    for name, part in memory["parts"].items():
        if part:
            yield f"  {name}", size(part)
    if memory["evaluation"] > memory["training"]:
        yield "  evaluation needs more", f"{size(memory['evaluation'])}: lower evaluation.batch_size"
    pass_ = memory["pass"]
    at_once = f", {memory['passes_at_once']} at the same time" if memory["passes_at_once"] > 1 else ""
    again = "; layers are computed again (training.checkpointing)" if memory["checkpointing"] else ""
    yield "  largest pass", f"{pass_['examples']:,} rows, {pass_['tokens']:,} tokens{at_once}{again}"
    yield "  clients trained at once", f"{memory['clients_at_once']:,}"
