"""A finished or unfinished run as one HTML file to read, print and keep: all sections in order, written atomically.

Here are the sections on the run as a whole: its name, the first screen, all results, and sections to look things up in. The
others have files of their own:

    record      the run directory as one frozen value
    guarantee   the guarantee that the files state, its pictures and its details
    for_the_record   who answers for the run, its origin and digests, the statement, and copies without protection
    privacy     the clients' protection, and the server's view
    masks       secure aggregation: its parameters and its cost
    measured    the metrics of a task in words, and the run's own membership inference
    curves      accuracy, loss, bytes and diagnostics over the rounds
    markup      the HTML shapes of the sections, and drawings; the one place where text is escaped

A section is a function `RunRecord -> HTML`, and returns "" where it does not apply to the run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from secure_fed.activity import activity
from secure_fed.errors import RunDirectoryError
from secure_fed.learning.tasks.headline import scores, spoken
from secure_fed.report import curves, for_the_record, guarantee, markup, privacy
from secure_fed.report.formatting import MISSING, counted, duration, listed, number, percent, rate, size
from secure_fed.report.markup import facts, figure, figures, folded, paragraph, section, table, text
from secure_fed.report.masks import masked, secure_aggregation
from secure_fed.report.measured import headline, how_good, key_numbers, keys, measured, membership, short_auc
from secure_fed.report.record import RunRecord, owned, read
from secure_fed.runs.directory import REPORT, private_part, without_times
from secure_fed.runs.durable import atomic_write

# The browser itself then refuses every request and every script, whatever the run's names contain.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` of the run in `run_dir` and return its path.

    The file is written whole or not at all, needs no network, runs no script, and is the same, byte for byte, for the same
    contents of the run directory. The report of a private run is made only from the public part. A second report, from both
    parts, is written into the private part.
    """
    path, private = run_dir / REPORT, private_part(run_dir)
    try:
        with activity("writing the report"):
            shown, own = read(run_dir), owned(run_dir)
            content = page(shown if shown.private else own)
            passed_on = {**own.digests, REPORT: hashlib.sha256(content.encode("utf-8")).hexdigest()}
            whole = page(replace(own, digests=passed_on)) if shown.private else content
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Rounds, result and facts are shown as found in the files, even if somebody edited them.
        raise RunDirectoryError(f"{run_dir} is damaged: it holds a value that no run writes ({error})") from error
    atomic_write(path, content)
    if shown.private:
        if private.is_dir():
            atomic_write(private / REPORT, whole, private=True)
        without_times(run_dir)
    return path


def page(record: RunRecord) -> str:
    """The whole HTML document."""
    sections = (
        heading,
        summary,
        privacy.privacy,
        curves.learning,
        membership,
        secure_aggregation,
        curves.traffic,
        curves.diagnostics,
        clients,
        rejected,
        results,
        rounds,
        configuration,
        for_the_record.unguarded,
        for_the_record.record_of,
        for_the_record.statement,
    )
    return document(f"{record.name}: federated fine-tuning report", "".join(one(record) for one in sections))


def document(title: str, html: str, style: str = "") -> str:
    """`html` as a separate page in the style of the reports; `style` is added to their style sheet."""
    sheet = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n"
        f"<style>\n{sheet}{style}</style>\n</head>\n<body>\n<main>\n{html}</main>\n</body>\n</html>\n"
    )


def heading(record: RunRecord) -> str:
    """The run's name, whether it is finished, whether it was simulated, and a warning if its requested privacy is void."""
    done = f"{number(len(record.rounds))} of {counted(record.planned, 'round')}"
    finished = "Ended early" if record.ended_early else "Finished"
    if record.result:
        state = paragraph(f"{finished}: {done}", "state")
    else:
        state = paragraph(f"Not finished: {done} done", "state open")
    state += "" if record.deployed else paragraph("Simulated: one process held all clients' data", "state")
    warning = paragraph("NOT PRIVATE", "state open") if privacy.void(record) else ""
    title = f'<p class="kind">Federated fine-tuning report</p>\n<h1>{text(record.name)}</h1>\n'
    return f"<header>\n{title}{state}{warning}</header>\n"


def summary(record: RunRecord) -> str:
    """The run in two sentences, the key numbers, and the two pictures of its protection."""
    stated = guarantee.stated(record)
    key = (
        *key_numbers(record),
        ("epsilon", privacy.short(record)),
        *(
            [guarantee.two_units(stated.unit, stated.terms)]
            if stated and stated.holds and "groups" in stated.terms
            else []
        ),
        *headline(record),
    )
    return section(
        "In short",
        _notice(record),
        paragraph(f"{_who_trained_what(record)} {how_good(record)}{_averaged(record)}", "lead"),
        facts(key, "key"),
        figures(guarantee.guarantee_picture(record), guarantee.path_picture(record)),
        paragraph(f"{_what_travelled(record)} {_how_long(record)}", "after"),
    )


def _notice(record: RunRecord) -> str:
    """The reason why these are not the numbers after the last planned round; empty if they are."""
    numbers = "These are the numbers after its last finished round."
    if record.ended_early:
        return paragraph(f"The run ended before its last planned round: {record.ended_early}. {numbers}", "notice")
    again = "To continue from there, repeat the command that started it with --resume."
    return "" if record.result else paragraph(f"This run has not finished. {numbers} {again}", "notice")


def _who_trained_what(record: RunRecord) -> str:
    those_in = f"{_cohort(record)} of the clients"
    if record.hides_training:
        those_in = f"all of the clients, of whom {_cohort(record)} train,"
    open_end = " before the run ended" if record.ended_early else " so far"
    all_done = record.result and not record.ended_early
    so_far = "" if all_done else f", {number(len(record.rounds))} of them done{open_end}"
    return (
        f"{counted(len(record.client_names), 'client')} ({_PARTIES}) fine-tuned the model {_model(record)} together on"
        f" {_data(record)}, using the method {record.config.method.name}: {counted(record.planned, 'round')}{so_far},"
        f" with {those_in} in each."
    )


def _averaged(record: RunRecord) -> str:
    """A note where the run ended with a mean of models, which the numbers are of."""
    last = record.config.federation.averaged
    if last == 1 or record.result is None or record.ended_early:
        return ""
    return f" These are the numbers of the mean model of its last {number(last)} rounds."


def _what_travelled(record: RunRecord) -> str:
    trained = (record.result or {}).get("trainable")
    what = f"{number(trained)} trained parameters" if trained else "the trained parameters"
    expected = " These are expected sizes: how many clients took part is secret."
    return (
        f"Clients sent updates of {what}, not texts: {size(record.total('bytes_up'))} from the"
        f" clients to the server and {size(record.total('bytes_down'))} back.{expected if record.hides_cohort else ''}"
    )


def _how_long(record: RunRecord) -> str:
    left_out = sum(len(names) for _, names in record.rejected)
    why = "did not follow the protocol" if masked(record) else "contained numbers that are not finite"
    updates = f" The server left out {counted(left_out, 'update')} that {why}."
    seconds = _seconds(record)
    time = f"{'It took' if record.result else 'So far it took'} {duration(seconds)}."
    if seconds is None:
        in_turn = record.config.federation.sampling == "schedule"
        why = ": it would reveal something about the clients that trained" if in_turn else _TELLS_HOW_MANY
        time = f"The duration is withheld{why}."
    return f"{time}{updates if left_out else ''}"


def results(record: RunRecord) -> str:
    """Every number of the result as a table, folded away; of an unfinished run the numbers so far."""
    result, stated = record.result or {}, guarantee.stated(record)
    expected = ", expected" if record.hides_cohort else ""
    drawn = "clients in a round" if record.config.privacy.unit in ("none", "client") else "units in a batch"
    clients = number(len(record.client_names))
    # Dummy examples belong to clients and are not counted here.
    dummies = (record.facts.get("dummies") or {}).get("units")
    if dummies and record.config.privacy.unit in ("none", "client"):
        clients += f", and {number(dummies)} dummy clients for the audit"
    rows = (
        ("method", record.config.method.name),
        ("model", _model(record)),
        ("data", _data(record)),
        ("task", str(record.facts.get("task", MISSING))),
        ("clients", clients),
        ("clients that train in a round" if record.hides_training else "clients a round", _cohort(record)),
        ("rounds", f"{number(len(record.rounds))} of {number(record.planned)}"),
        *key_numbers(record),
        *(("membership AUC, by the run itself", short_auc(found)) for found in [measured(record)] if found),
        ("test loss", number(record.last("loss"))),
        *_own_metrics(record),
        ("trained numbers", number(result.get("trainable"))),
        ("privacy unit", record.config.privacy.unit),
        (f"share of the {drawn}", rate(result.get("sampling_rate"))),
        ("noised releases of this run" if record.private else "rounds times passes", number(result.get("releases"))),
        (f"sent by clients{expected}", size(record.total("bytes_up"))),
        (f"sent to clients{expected}", size(record.total("bytes_down"))),
        ("duration", duration(_seconds(record))),
        ("seed", f"{record.config.federation.seed}{_NOT_THE_NOISE if stated and stated.holds else ''}"),
    )
    return section("Result", folded("Every number of the result", facts(rows)))


def _own_metrics(record: RunRecord) -> Iterator[tuple[str, str]]:
    """Other metrics of the task or the user that are single numbers."""
    measured = (record.result or {}).get("metrics") or {}
    if "sketch_residual" in measured:
        yield "lost by the sketch, last round", percent(measured["sketch_residual"])
    for name, value in measured.items():
        if isinstance(value, int | float) and name not in ("sketch_residual", *keys(record)):
            yield str(name), number(value)


def _model(record: RunRecord) -> str:
    return str((record.result or {}).get("model") or record.config.model.name)


def _data(record: RunRecord) -> str:
    """The result's name for the data, else the training files, else the configured name."""
    files = record.config.data.train
    configured = (files if isinstance(files, str) else ", ".join(files)) or record.config.data.name
    return str((record.result or {}).get("data") or configured)


def _cohort(record: RunRecord) -> str:
    federation, drawn = record.config.federation, record.last("cohort")
    by_itself = record.hides_cohort or record.hides_training
    coins = federation.sampling == "poisson" or (federation.sampling == "auto" and by_itself)
    about = "about " if coins else ""
    return about + number(federation.cohort or (None if drawn is None else round(drawn)))


def _seconds(record: RunRecord) -> float | None:
    """The duration of the rounds, where it is not withheld."""
    if record.private and not record.owned:
        return None
    return float((record.result or {}).get("seconds") or record.total("seconds"))


def clients(record: RunRecord) -> str:
    """The number of examples of each client, and the divergence of their labels."""
    if not record.clients:
        return ""
    sizes = sorted((examples for _, examples in record.clients), reverse=True)
    rows = ((name, number(examples)) for name, examples in record.clients)
    return section(
        "Clients",
        paragraph(_sizes(sizes)),
        figures(
            figure(
                "Examples of each client",
                markup.bars("Examples of each client", sizes, x_label="client, largest first", y_label="examples"),
                "Each bar is one client.",
            ),
            _label_skew(record),
        ),
        folded("Every client by name", table(("client", "examples"), rows)),
    )


def _sizes(sizes: list[int]) -> str:
    verb = "holds" if len(sizes) == 1 else "hold"
    held = f"{counted(len(sizes), 'client')} {verb} {number(sum(sizes))} examples"
    if sizes[0] == sizes[-1]:
        return f"{held}, {number(sizes[0])} each."
    middle = number(round(median(sizes)))
    return f"{held}: from {number(sizes[-1])} to {number(sizes[0])} each, median {middle}."


def _label_skew(record: RunRecord) -> str:
    divided = record.facts.get("partition", {})
    divergence = divided.get("jensen_shannon")
    if divergence is None:
        return ""
    title = "Label skew between clients"
    return figure(
        title,
        markup.scale(title, float(divergence), low="0: same mix of labels", high="1: no label in common"),
        f"Jensen-Shannon divergence between clients: {number(float(divergence))}"
        f" (split of the data: {divided.get('kind', record.config.data.partition)}).",
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
        if name != "record"  # which has its own section, with less on the page that may be passed on
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


_PARTIES = "parties with data of their own, such as hospitals or phones, not the people in the data"
_NOT_THE_NOISE = ", of public choices alone: noise and secret choices came from the operating system's entropy"
_TELLS_HOW_MANY = ", because it would reveal how many clients trained"
_NOT_FINITE = "These updates contained numbers that are not finite."
_REFUSED = "What these clients sent did not follow the protocol of secure aggregation."
_WENT_ON = "The round continued with the other clients; nothing of these updates is in the model."
