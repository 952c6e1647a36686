"""The result of a finished run: `result.json` (schema: docs/result.schema.json)."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from secure_fed.config.settings import DIAGNOSTICS
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.data.sources import generated
from secure_fed.learning.models.locate import BUILTIN, never_saw
from secure_fed.learning.tasks.headline import no_better, percent
from secure_fed.methods.method import State
from secure_fed.rounds import diagnostics
from secure_fed.rounds.sums import Record
from secure_fed.runs import membership
from secure_fed.runs.assembly import Assembly
from secure_fed.runs.budget import RunBudget
from secure_fed.runs.evaluation import best, metrics_of
from secure_fed.runs.guarantee import guarantee, noise_in_words, unprotected

SCHEMA = 1
_METRICS = ("accuracy", "macro_f1", "loss")
_LEAST = 0.01  # of the loss at the start: a smaller fall is none

_version = cache(version)  # read from disk; constant within a process


def versions() -> dict[str, str]:
    """The versions of the software that computes the run."""
    packages = ("secure-fed", "torch", "transformers", "peft")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def origin() -> dict[str, str]:
    """When and where a run began, and the commit of secure-fed if it runs from a checkout: for the owner's record alone."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    return {"began": now(), "machine": f"{platform.node()} ({system}, {os.cpu_count()} cores)", "commit": _commit()}


def now() -> str:
    """The time, with its time zone."""
    return datetime.now().astimezone().isoformat(timespec="seconds")


@cache
def _commit() -> str:
    """As git describes it; "" without git, or where the package is no checkout."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def summary(
    assembly: Assembly,
    state: State,
    records: Sequence[Record],
    run_dir: Path | None,
    budget: RunBudget | None = None,
    ended_early: str = "",
    noise_alone: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The run in one flat object; `metrics` has the task's remaining metrics.

    ended_early: the reason if the run ended before its last round. noise_alone: the figures of the probe (`runs.hopeless`).
    """
    config, last = assembly.config, records[-1] if records else {}
    plan = assembly.method.plan(assembly.initial)
    sampler = assembly.server.sampler
    return {
        "schema": SCHEMA,
        **_subject(assembly),
        "rounds": state.round,
        "clients": len(assembly.clients),
        "cohort": round(sampler.expected),
        "personal": list(assembly.server.personal),
        **{name: last.get(name) for name in _METRICS},
        "commonest": None if (common := assembly.problem.commonest) is None else asdict(common),
        "no_learning": no_learning(assembly, last, noise_alone) or None,
        "test": assembly.problem.facts["test"],
        "noise_alone": noise_alone,
        **membership.result_entries(assembly, state),
        "metrics": {name: value for name, value in last.items() if name not in _ALWAYS and name not in _METRICS},
        **(
            _unprotected(assembly, len(plan.passes) * state.round)
            if budget is None
            else guarantee(assembly, budget, run_dir, records)
        ),
        "ended_early": ended_early or None,
        "best_round": found["round"] if (found := best(records, config.data.task)) else None,
        "bytes_up": sum(record["bytes_up"] for record in records),
        "bytes_down": sum(record["bytes_down"] for record in records),
        "secure_aggregation": masked_facts(assembly, records),
        "diagnostics": _diagnosed(assembly, records),
        "recorded": config.evaluation.record,
        "trainable": assembly.initial.tensors.select(plan.trainable).numel,
        "seconds": sum(record["seconds"] for record in records),
        "seed": config.federation.seed,
        "run_dir": str(run_dir) if run_dir else None,
        "versions": versions(),
    }


def no_learning(assembly: Assembly, last: Record, noise_alone: Mapping[str, Any] | None) -> str:
    """The sentences on a run that learned nothing, with the likely reasons; "" if it learned, or where nothing is known.

    Its accuracy is no better than always giving the commonest label, or than a guess among the labels where the test rows were
    held out of private ones: how often each occurs is private then. In a task whose accuracy counts no labels, its loss is that
    of the start. Metrics of the user's own are not called once more for that. last: the last round's record. noise_alone:
    the figures of the probe.
    """
    config, problem = assembly.config, assembly.problem
    accuracy, loss, labels = last.get("accuracy"), last.get("loss"), len(problem.facts["label_names"])
    secret = config.privacy.unit != "none" and not is_declared(problem.facts["test"]["from"])
    said = no_better(accuracy, problem.commonest)
    if secret and config.data.task == "classification" and labels and accuracy is not None and accuracy * labels <= 1:
        said = f"The accuracy of {percent(accuracy)} is no better than a guess among {labels} labels: it shows no learning."
    ours = problem.tokenizer is not None
    if ours and not secret and problem.commonest is None and loss is not None and not config.method.personal:
        start = metrics_of(assembly, assembly.initial.tensors, problem.test).get("loss", math.inf)
        if not loss < start - _LEAST * abs(start):
            said = f"The loss of {loss:.4g} is no better than {start:.4g} at the start: it shows no learning."
    if not said:
        return ""
    foreign = ours and config.model.name in BUILTIN and not generated(config.data)
    reasons = [never_saw(config.model.name, config.data.task)] if foreign else []
    if plan := assembly.protection.plan:
        noise = f": {noise_in_words(noise_alone)}" if noise_alone else ""
        reasons.append(f"noise (multiplier {plan.noise_multiplier:.3g}{noise}; more units or more epsilon need less)")
    if assembly.local is None:
        reasons.append(f"the rate (training.lr = {config.training.rate:g}; try three times as much, and a third)")
    reasons.append(f"few rounds (federation.rounds = {config.federation.rounds})")
    return f"{said} Likely reasons: {'; '.join(reasons)}."


def _unprotected(assembly: Assembly, releases: int) -> dict[str, Any]:
    """The privacy entries of a run without privacy."""
    guaranteed = (
        "epsilon",
        "epsilon_participants",
        "delta",
        "noise_multiplier",
        "epsilon_cumulative",
        "delta_cumulative",
    )
    return dict.fromkeys((*guaranteed, "privacy")) | {
        "holds_against": [],
        "unit": "none",
        "sampling_rate": assembly.server.sampler.rate,
        "releases": releases,
        "privacy_statement": unprotected(assembly.config),
    }


def masked_facts(assembly: Assembly, records: Sequence[Record]) -> dict[str, Any] | None:
    """The terms of secure aggregation, and its cost in bytes and seconds; None without it."""
    if assembly.masks is None:
        return None
    terms, clients = assembly.masks.sums.terms, assembly.masks.invited
    choice, rounds = terms.choice(clients), [record["masked"] for record in records if "masked" in record]
    counted = [one["survivors"] for one in rounds if one["survivors"] is not None]
    return {
        "clients": clients,
        "coins": terms.varies,
        "neighbours": choice.neighbours,
        "threshold": choice.threshold,
        "least": terms.least(clients),
        "shares": None if (shares := assembly.protection.shares) is None else shares.shares,
        "corrupt": choice.corrupt,
        "active": terms.settings.active,
        "bits": terms.settings.bits,
        "failure": choice.failure,
        "abort": choice.abort,
        "survivors": min(counted, default=None),
        "rounds_lost": sum("lost" in record for record in records),
        "caught": {name: how for record in records for name, how in record.get("caught", {}).items()},
        **{
            name: sum(one[name] for one in rounds)
            for name in ("bytes_up", "bytes_down", "client_seconds", "server_seconds")
        },
    }


def _diagnosed(assembly: Assembly, records: Sequence[Record]) -> dict[str, Any] | None:
    """The requested diagnostics, of the last round or of the whole run; None if none was requested."""
    settings, protection = assembly.config.evaluation, assembly.protection
    last = records[-1] if records else {}
    secret = protection.hides_cohort or protection.hidden
    found = {name: last.get(name) for name in settings.diagnostics}
    task = assembly.config.data.task
    return found | diagnostics.summary(records, settings, task, secret_cohort=secret) or None


def _subject(assembly: Assembly) -> dict[str, Any]:
    """The method, model and data of the run."""
    config, problem = assembly.config, assembly.problem
    own_model, train = problem.tokenizer is None, config.data.train
    files = train if isinstance(train, str) else ", ".join(train)
    return {
        "method": config.method.name,
        "model": type(problem.model).__name__ if own_model else config.model.name,
        "data": "given in Python" if own_model else files or config.data.name,
        "task": problem.facts["task"],
        "label_names": problem.facts["label_names"],
    }


_ALWAYS = (
    *("round", "train_loss", "cohort", "rejected", "bytes_up", "bytes_down", "lr", "seconds"),
    *("masked", "caught", "lost", *DIAGNOSTICS, "transfer_seconds"),
)
