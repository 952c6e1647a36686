"""The part of the report that everybody reads: the run in words, what protects the clients, the result."""

from __future__ import annotations

from secure_fed.report.markup import facts, paragraph, section, text
from secure_fed.report.record import RunRecord
from secure_fed.report.words import MISSING, counted, duration, number, percent, rate, size


def heading(record: RunRecord) -> str:
    """The run's name, and whether it is finished."""
    done = f"{number(len(record.rounds))} of {counted(record.planned, 'round')}"
    state = f"Finished: {done}" if record.result else f"Not finished: {done} done"
    return (
        f'<header>\n<p class="kind">Federated fine-tuning report</p>\n<h1>{text(record.name)}</h1>\n'
        f'<p class="state{"" if record.result else " open"}">{text(state)}</p>\n</header>\n'
    )


def summary(record: RunRecord) -> str:
    """The run in one paragraph, and the few numbers that everybody asks for."""
    sentences = (_who_trained_what(record), _how_good(record), _what_travelled(record), _how_long(record))
    key = (
        ("accuracy", percent(record.last("accuracy"))),
        ("macro-F1", number(record.last("macro_f1"))),
        ("epsilon", "no guarantee"),
        ("sent by clients", size(record.total("bytes_up"))),
        ("sent to clients", size(record.total("bytes_down"))),
    )
    return section("In short", paragraph(" ".join(sentences), "lead"), facts(key, "key"))


def privacy(record: RunRecord) -> str:
    """That nothing protects the clients, which is so for every run today, whatever its files say."""
    stated = (record.result or {}).get("privacy_statement")
    recorded = paragraph(f"Recorded with the result: “{stated}”", "recorded") if stated else ""
    return section(
        "Privacy: this run is not protected",
        paragraph("No differential privacy and no secure aggregation protect this run.", "verdict"),
        paragraph(
            "Each client's contribution is visible to the server: whoever runs the server, or can read what"
            " reaches it, sees what every single client sent, and may infer from it which texts that client"
            " holds."
        ),
        paragraph(
            "Nothing limits what the trained model reveals about one client or one text, so there is no"
            " epsilon to state. If the training texts are personal data, treat the model and the"
            " contributions as personal data too."
        ),
        recorded,
        css_class="privacy warning",
    )


def results(record: RunRecord) -> str:
    """The result as a table; for an unfinished run the numbers so far, and how to go on."""
    notice = paragraph(
        "This run has not finished, so it has no result yet: these are the numbers after its last finished"
        " round. To go on from there, repeat the command that started it with --resume.",
        "notice",
    )
    result = record.result or {}
    rows = (
        ("method", record.config.method.name),
        ("model", _model(record)),
        ("data", _data(record)),
        ("task", str(record.facts.get("task", MISSING))),
        ("clients", number(len(record.client_names))),
        ("clients a round", _cohort(record)),
        ("rounds", f"{number(len(record.rounds))} of {number(record.planned)}"),
        ("accuracy", percent(record.last("accuracy"))),
        ("macro-F1", number(record.last("macro_f1"))),
        ("test loss", number(record.last("loss"))),
        *_own_metrics(record),
        ("trained numbers", number(result.get("trainable"))),
        ("privacy unit", "none"),
        ("sampling rate", rate(result.get("sampling_rate"))),
        ("releases", number(result.get("releases"))),
        ("sent by clients", size(record.total("bytes_up"))),
        ("sent to clients", size(record.total("bytes_down"))),
        ("duration", duration(_seconds(record))),
        ("seed", str(record.config.federation.seed)),
    )
    return section("Result", "" if record.result else notice, facts(rows))


def _who_trained_what(record: RunRecord) -> str:
    so_far = "" if record.result else f", {number(len(record.rounds))} of them done so far"
    return (
        f"{counted(len(record.client_names), 'client')} fine-tuned the model {_model(record)} together on"
        f" {_data(record)}, using the method {record.config.method.name}: {counted(record.planned, 'round')}{so_far},"
        f" with {_cohort(record)} of the clients in each."
    )


def _how_good(record: RunRecord) -> str:
    accuracy, loss = record.last("accuracy"), record.last("loss")
    if accuracy is None and loss is None:
        return "The shared model has not been evaluated on test examples."
    if accuracy is None:
        return f"The loss of the shared model on the test examples is {number(loss)}."
    labels = len(record.facts["label_names"])
    label = f"one of {counted(labels, 'class', 'classes')}" if labels else "class"
    return (
        f"The shared model finds the right {label} for {percent(accuracy)} of the test examples"
        f" (macro-F1 {number(record.last('macro_f1'))})."
    )


def _what_travelled(record: RunRecord) -> str:
    trained = (record.result or {}).get("trainable")
    what = f"the {number(trained)} trained numbers" if trained else "the trained numbers"
    return (
        f"What travelled were changes to {what}, not texts: {size(record.total('bytes_up'))} from the"
        f" clients to the server and {size(record.total('bytes_down'))} back."
    )


def _how_long(record: RunRecord) -> str:
    left_out = sum(len(names) for _, names in record.rejected)
    updates = f" The server left out {counted(left_out, 'update')} that held numbers that are not finite."
    took = "It took" if record.result else "So far it took"
    return f"{took} {duration(_seconds(record))}.{updates if left_out else ''}"


def _own_metrics(record: RunRecord) -> list[tuple[str, str]]:
    """What else the task or the user measured, where it is one number."""
    measured = (record.result or {}).get("metrics") or {}
    return [(str(name), number(value)) for name, value in measured.items() if isinstance(value, int | float)]


def _model(record: RunRecord) -> str:
    return str((record.result or {}).get("model") or record.config.model.name)


def _data(record: RunRecord) -> str:
    """The result's name for the data, else the training files, else the configured name."""
    files = record.config.data.train
    configured = (files if isinstance(files, str) else ", ".join(files)) or record.config.data.name
    return str((record.result or {}).get("data") or configured)


def _cohort(record: RunRecord) -> str:
    federation, drawn = record.config.federation, record.last("cohort")
    about = "about " if federation.sampling == "poisson" else ""
    return about + number(federation.cohort or (None if drawn is None else round(drawn)))


def _seconds(record: RunRecord) -> float:
    return float((record.result or {}).get("seconds") or record.total("seconds"))
