"""A run directory as `secure-fed train` leaves it, small and made by hand."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from secure_fed.report import markup
from tests.golden import said

CLIENTS = [f"ward {letter}" for letter in "ABCDEFGH"]
LABELS = ["asthma", "sepsis", "fracture", "stroke"]
SIZES = [1900, 1200, 900, 640, 410, 300, 190, 60]
VERSIONS = {"secure-fed": "0.1.0", "torch": "2.13.0"}

RunFolder = Callable[..., Path]
Ran = Callable[..., tuple[int, str, str]]
Refuses = Callable[..., str]


def config_of(rounds: int) -> dict[str, dict[str, Any]]:
    return {
        "model": {"name": "builtin/tiny", "device": "cpu", "max_length": 128},
        "data": {"name": "builtin/notes", "train": "", "partition": "dirichlet", "alpha": 0.5},
        "federation": {"clients": 8, "cohort": 4, "rounds": rounds, "seed": 7, "sampling": "fixed"},
        "method": {"name": "ffa_lora", "rank": 8, "target_modules": ["query", "value"]},
        "training": {"lr": 0.002, "epochs": 1, "batch_size": 16},
        "privacy": {"unit": "none"},
        "evaluation": {"every": 1, "per_client": True},
    }


def round_row(number: int) -> dict[str, Any]:
    progress = 1 - 0.8**number
    return {
        "round": number,
        "accuracy": 0.25 + 0.62 * progress,
        "macro_f1": 0.20 + 0.65 * progress,
        "loss": 1.4 - 0.9 * progress,
        "train_loss": 1.45 - 1.1 * progress,
        "cohort": 4,
        "rejected": [],
        "bytes_up": 1_234_567,
        "bytes_down": 1_734_567,
        "seconds": 4.5,
        "lr": 0.002,
        "clients_accuracy": {"mean": 0.25 + 0.6 * progress, "worst_decile": 0.1 + 0.5 * progress},
    }


def result_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "schema": 1,
        "method": "ffa_lora",
        "model": "builtin/tiny",
        "data": "builtin/notes",
        "task": "classification",
        "rounds": len(rows),
        "clients": 8,
        "cohort": 4,
        "personal": [],
        "accuracy": rows[-1].get("accuracy"),
        "commonest": {"share": 0.31, "of": 2000},
        "no_learning": None,
        "macro_f1": rows[-1].get("macro_f1"),
        "loss": rows[-1].get("loss"),
        "test": {"from": "generated", "rows": 2000},
        "membership": None,
        "recorded": "nothing",
        "metrics": {"clients_accuracy": rows[-1].get("clients_accuracy"), "top_2": 0.953} if rows else {},
        "unit": "none",
        "epsilon": None,
        "epsilon_participants": None,
        "holds_against": [],
        "delta": None,
        "noise_multiplier": None,
        "sampling_rate": 0.5,
        "releases": len(rows),
        "epsilon_cumulative": None,
        "delta_cumulative": None,
        "privacy": None,
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "secure_aggregation": None,
        "trainable": 18_436,
        "seconds": 4.5 * len(rows),
        "seed": 7,
        "run_dir": "runs/hand-made",
        "label_names": LABELS,
        "versions": VERSIONS,
        "privacy_statement": "No differential privacy: the privacy unit of this run is none.",
        "ended_early": None,
        "best_round": len(rows) or None,
    }


STATEMENT = {
    "unit": "a client with everything it has",
    "adjacency": "one client added or removed",
    "epsilon": 2.961,
    "epsilon_participants": 7.5,
    "delta": 1e-5,
    "mechanism": "Gaussian with noise multiplier 1.1",
    "sampling": "a client takes part in a round if its own secret coin says so, rate 0.5",
    "accountant": "privacy loss distributions",
    "noise": "by the server, to the sum of each pass",
    "trust": "the server sees every contribution",
    "released": "12 noised sums",
    "holds_against": ["reader"],
    "not_covered": ["the choice of hyper-parameters", "an evaluation on private test data"],
    "private": True,
    "clip_norm": 1.0,
}


def make_private(run: dict[str, Any], **terms: Any) -> None:
    """Turns the hand-made run into a private one with noise on sums; `terms` override entries of its privacy statement."""
    run["config"]["privacy"] = {"unit": "client", "epsilon": 3.0, "noise": "central"}
    run["config"]["evaluation"]["per_client"] = False
    run["config"]["federation"]["sampling"] = "poisson"
    for row in run["rows"]:
        del row["train_loss"], row["rejected"], row["seconds"]
        del row["clients_accuracy"]
    statement = {**STATEMENT, **terms}
    run["run"]["privacy"] = {**statement, "noise_multiplier": 1.1, "text": "The plan in words."}
    if run["result"] is not None:
        ledger = {
            "planned_releases": run["config"]["federation"]["rounds"],
            "curve": [{"delta": 1e-3, "epsilon": 2.1}, {"delta": 1e-5, "epsilon": statement["epsilon"]}],
            "gaussian_mu": None,
            "groups": [{"units": 2, "delta": 1e-4, "epsilon": 9.0, "exact": False}],
            "participations": None,
            "place": "sum",
            "hidden_cohort": False,
            "realised": None,
            "ledger": "runs/hand-made/budget.sqlite",
            "data_set": "wards",
            "budget_epsilon": 3.0,
            "budget_delta": 1e-5,
        }
        numbers = {name: statement[name] for name in ("epsilon", "epsilon_participants", "delta")}
        run["result"] |= {
            **numbers,
            "holds_against": statement["holds_against"],
            "unit": "client",
            "noise_multiplier": 1.1,
            "epsilon_cumulative": 2.961,
            "delta_cumulative": 1e-5,
            "privacy": {**statement, **ledger},
            "privacy_statement": "The guarantee in words.",
            "metrics": {},
            "seconds": None,
        }


_DRAWINGS = ("lines", "bars", "scale", "tradeoff")
_DRAWN: dict[str, str] = {}


def _known(args: tuple[Any, ...]) -> list[Any]:
    """The arguments of a plot, with some values in place of a curve."""
    return [one(np.linspace(0, 1, 9)).tolist() if callable(one) else one for one in args]


@pytest.fixture(scope="module")
def drawn_once() -> Iterator[dict[str, str]]:
    """Caches plots by their arguments: plots take nearly all of a report's time, and most runs here have the same numbers.

    The value is the cache. A test that checks that equal numbers give equal plots must clear it.
    """

    def remembering(draw: Callable[..., str]) -> Callable[..., str]:
        def drawn(*args: Any, **named: Any) -> str:
            key = repr((draw.__name__, _known(args), sorted(named.items())))
            if key not in _DRAWN:
                _DRAWN[key] = draw(*args, **named)
            return _DRAWN[key]

        return drawn

    with pytest.MonkeyPatch.context() as patch:
        for name in _DRAWINGS:
            patch.setattr(markup, name, remembering(getattr(markup, name)))
        yield _DRAWN


@pytest.fixture(scope="module")
def never_drawn() -> Iterator[None]:
    """Replaces each plot by the text of its arguments: two pages differ where their plots would."""

    def noting(name: str) -> Callable[..., str]:
        def noted(title: str, *args: Any, **named: Any) -> str:
            if name == "lines" and not any(math.isfinite(value) for one in args[0] for _, value in one.points):
                return ""  # as the plot itself
            return f'<svg aria-label="{title}">{html.escape(repr((name, _known(args), named)))}</svg>'

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for name in _DRAWINGS:
            patch.setattr(markup, name, noting(name))
        yield


@pytest.fixture
def private_edit() -> Callable[..., Callable[[dict[str, Any]], None]]:
    """Makes an `edit` for `run_folder`: `private_edit(epsilon=20.0)` makes the run private with a stated epsilon of 20."""
    return lambda **terms: lambda run: make_private(run, **terms)


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """Writes a run directory of `rounds` finished rounds, after `edit` has changed its content."""

    def write(
        rounds: int = 12,
        *,
        planned: int | None = None,
        finished: bool = True,
        name: str = "hand-made",
        edit: Callable[[dict[str, Any]], None] = lambda run: None,
    ) -> Path:
        rows = [round_row(number) for number in range(1, rounds + 1)]
        run: dict[str, Any] = {
            "config": config_of(planned or rounds),
            "run": {
                "task": "classification",
                "label_names": list(LABELS),
                "clients": list(CLIENTS),
                "partition": {"kind": "dirichlet", "jensen_shannon": 0.1834, "sizes": list(SIZES)},
                "test": {"from": "generated", "rows": 2000},
                "versions": dict(VERSIONS),
            },
            "rows": rows,
            "result": result_of(rows) if finished else None,
        }
        edit(run)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(run["config"]), encoding="utf-8")
        (folder / "run.json").write_text(json.dumps(run["run"]), encoding="utf-8")
        lines = "".join(json.dumps(row) + "\n" for row in run["rows"])
        (folder / "metrics.jsonl").write_text(lines, encoding="utf-8")
        if run["result"] is not None:
            (folder / "result.json").write_text(json.dumps(run["result"]), encoding="utf-8")
        return folder

    return write


@pytest.fixture
def ran(capsys: pytest.CaptureFixture[str]) -> Ran:
    """Runs a command; returns its exit status, standard output and standard error."""
    from secure_fed.commands.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([*map(str, arguments)])
        except SystemExit as end:  # the parser's own
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def refuses(ran: Ran) -> Refuses:
    """Runs a command that must print nothing, and end with status 2 and a last sentence that is kept; returns the sentence."""

    def run(*arguments: object, status: int = 2, hide: str | None = None) -> str:
        ended, out, error = ran(*arguments)
        assert (ended, out) == (status, ""), error
        assert "Traceback" not in error
        sentence = error.strip().splitlines()[-1]
        said(sentence, hide=hide)
        return sentence

    return run
