"""An audit: every attack that a vantage point allows, made on one run, and held against who was really a member.

Attacks get a `Case`, which holds no truth; `judge` gets their scores and the coins. An attack is made once, from the weakest
vantage that allows it; whoever sees more can make it too, and its cells there say the same. Intervals are of 95 % each; lower
bounds, and the intervals called corrected, hold for all attacks on membership together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attacks import judge
from attacks.baseline import baseline
from attacks.case import Case, Finding, Inapplicable, Settings, Shadows
from attacks.catalogue import ATTACKS, Attack
from attacks.ranking import clients, exposed
from attacks.vantage import VANTAGES, seen
from attacks.verdict import verdict
from secure_fed import recording
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, RunDirectoryError, UsageError
from secure_fed.federation import Federation
from secure_fed.methods.method import State, fits
from secure_fed.parts import GIVEN
from secure_fed.recording import Recorded
from secure_fed.run_dir import CONFIG, RESULT, read_config, read_facts, read_object
from secure_fed.run_store import read_checkpoint

SCHEMA = 1
AUDIT, PAGE = "audit.json", "audit.html"
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Target:
    """What is audited: a federation as it was before its run, the state it ended with, and what was kept of the way there.

    result: the run's own summary.
    """

    federation: Federation
    final: State
    recorded: Recorded | None
    result: Mapping[str, Any]
    run_dir: Path | None = None


def opened(run_dir: Path) -> Target:
    """The run in this directory, its data read again, ready to be audited. Nothing is written, and no budget is touched."""
    facts, config = read_facts(run_dir), read_config(run_dir)
    if not (run_dir / RESULT).exists():
        raise RunDirectoryError(f"{run_dir} has not ended: go on with `secure-fed train --resume --out {run_dir}`")
    result = _result(run_dir, config)
    if facts.get("task") == GIVEN:
        raise RunDirectoryError(
            f"{run_dir} was trained on objects given in Python: audit it there, with attacks.audit.audited(Target(...))"
        )
    checkpoint = read_checkpoint(run_dir)
    if checkpoint is None:
        raise RunDirectoryError(f"{run_dir} is damaged: it has a result and no checkpoint; restore it")
    federation = Federation(config)
    for name in ("data_digest", "audit"):
        if federation.parts.facts.get(name) != facts.get(name):
            raise RunDirectoryError(
                f"{run_dir} was trained on other data than its settings lead to now, or by another version: {name} in run.json "
                "differs; an audit needs the very data that it was trained on"
            )
    if not fits(federation.method, federation.initial.tensors, checkpoint.state):
        raise RunDirectoryError(f"{run_dir} holds the state of another model than {config.model.name!r} is now")
    return Target(federation, checkpoint.state, recording.read(run_dir), result, run_dir)


def _result(run_dir: Path, config: RunConfig) -> dict[str, Any]:
    """The run's result, with all that an audit reads of it."""
    result = read_object(run_dir, RESULT)
    private = config.privacy.unit != "none"
    numbers = ("seconds", *(("epsilon", "epsilon_participants", "delta") if private else ()))
    whole = all(isinstance(result.get(name), int | float) for name in numbers)
    if not whole or result.get("unit") != config.privacy.unit or private is not isinstance(result.get("privacy"), dict):
        raise RunDirectoryError(f"{run_dir / RESULT} is damaged, or of another run than {CONFIG} beside it; restore it")
    return result


def chosen(names: Iterable[str]) -> list[Attack]:
    """The attacks of these names; all there are, of none."""
    names = list(dict.fromkeys(names))
    for name in names:
        if name not in ATTACKS:
            raise ConfigError(f"--attack is {name!r}, but the attacks are {', '.join(ATTACKS)}")
    return [ATTACKS[name] for name in names or ATTACKS]


def audited(
    target: Target,
    names: Sequence[str] = (),
    settings: Settings | None = None,
    *,
    show_texts: bool = False,
    progress: Progress = lambda said: None,
) -> dict[str, Any]:
    """The audit as `audit.json` holds it, without a sweep. names: of attacks, all if none. references 0: no shadows."""
    settings, held = settings or Settings(), target.federation.held
    attacks = chosen(names)
    why = held.why or ("" if 0 < held.members.sum() < len(held.members) else "all of the audit pool are on one side")
    found = _findings(target, attacks, settings, why, progress, asked=bool(names))
    judged = {name: one[0] for name, one in found.items() if not isinstance(one, str) and one[0].ranking}
    audit = _header(target, settings) | {
        "attacks": [{"name": one.name, "title": one.title, "paper": one.paper} for one in attacks],
        "cells": [_cell(target, attack, vantage, found[attack.name]) for attack in attacks for vantage in VANTAGES],
        "roc": {f"{name}/{ATTACKS[name].vantage}": one.curve for name, one in judged.items()},
        "baseline": _baseline(target, settings, why),
        **_standing_out(target.federation, list(judged.values()), show_texts=show_texts),
        "sweep": [],
    }
    return audit | {"verdict": verdict(audit)}


def _findings(
    target: Target, attacks: Sequence[Attack], settings: Settings, why: str, progress: Progress, *, asked: bool
) -> dict[str, tuple[judge.Judged, float] | str]:
    """What each attack found, held against the truth, and its seconds; or why there is nothing.

    why: there is no truth about membership; asked: the attacks were asked for by name.
    """
    shadows = Shadows(
        target.federation,
        settings.seed,
        lambda done, of: progress(f"round {done} of {of} of the reference adapters"),
        target.final.round,
    )
    level = settings.significance / max(1, sum(attack.membership for attack in attacks))
    found: dict[str, tuple[judge.Judged, float] | str] = {}
    for attack in attacks:
        progress(attack.title)
        nothing = why if attack.membership else ""
        found[attack.name] = nothing or _made(target, attack, settings, shadows, level, asked=asked)
    return found


def _standing_out(federation: Federation, judged: Sequence[judge.Judged], *, show_texts: bool) -> dict[str, Any]:
    """Whom the attack with the largest area exposes most."""
    best = max(judged, key=lambda one: one.ranking.auc if one.ranking else 0.0, default=None)
    if best is None or best.finding.scores is None:
        return {"clients": [], "exposed": []}
    scores = best.finding.scores
    return {
        "clients": clients(federation.held, scores),
        "exposed": exposed(federation, scores, show_texts=show_texts),
    }


def _made(
    target: Target, attack: Attack, settings: Settings, shadows: Shadows, level: float, *, asked: bool
) -> tuple[judge.Judged, float] | str:
    """The finding of an attack held against the truth, and its seconds; or why it could not be made."""
    if target.federation.config.evaluation.canaries == "direction" and not attack.directions:
        return "the audited units are canaries of random direction, which learn nothing of their examples"
    if attack.shadows and settings.references == 0:
        return "it needs reference adapters, each of which takes as long as the run: ask for them with --references 16"
    case = Case(target.federation, seen(attack.vantage, target.final.tensors, target.recorded), shadows)
    started = time.perf_counter()
    try:
        finding: Finding = attack.run(case, settings)
    except Inapplicable as error:
        return str(error)
    except UsageError as error:
        if asked:
            raise
        return f"it failed: {error}"
    delta = float(target.result.get("delta") or 0.0)
    members = target.federation.held.members
    held = judge.judged(finding, members, delta=delta, significance=level, seed=settings.seed)
    return held, time.perf_counter() - started


def _cell(target: Target, attack: Attack, vantage: str, found: tuple[judge.Judged, float] | str) -> dict[str, Any]:
    order = list(VANTAGES)
    if order.index(vantage) < order.index(attack.vantage):
        return judge.empty(attack.name, vantage, f"this adversary does not see {VANTAGES[attack.vantage].sees}")
    if isinstance(found, str):
        return judge.empty(attack.name, vantage, found)
    return judge.cell(attack.name, vantage, *found, accounted(target.result, vantage))


def accounted(result: Mapping[str, Any], vantage: str) -> float | None:
    """The epsilon that a run guarantees against this adversary, None if nothing.

    Noise on the sum protects from those who see the models made of it, and not from the server that adds it. Noise that each
    client adds protects from the server too, with what it costs that the server sees who takes part. The fellow client of an
    audit uses the models of all rounds and nothing else, which is what `epsilon` is about.
    Coins take a unit away altogether. That is no neighbour of guarantees in which a unit is replaced by another, or (with
    shares of noise) stays and sends its noise alone.
    """
    terms = result.get("privacy")
    if not terms or not terms.get("private", False) or "replaced" in str(terms.get("adjacency")):
        return None
    if terms.get("place") == "shares":
        return None
    if vantage in ("outsider", "fellow_client"):
        return float(result["epsilon"])
    return None if terms.get("place") == "sum" else float(result["epsilon_participants"])


def _header(target: Target, settings: Settings) -> dict[str, Any]:
    held, result = target.federation.held, target.result
    return {
        "schema": SCHEMA,
        "run_dir": str(target.run_dir) if target.run_dir else None,
        **{name: result.get(name) for name in ("method", "model", "data", "unit", "delta", "accuracy")},
        "audited_unit": held.kind,
        "canaries": target.federation.config.evaluation.canaries,
        "recorded": target.federation.config.evaluation.record,
        "epsilon_accounted": accounted(result, "outsider"),
        "members": int(held.members.sum()),
        "non_members": len(held.members) - int(held.members.sum()),
        "significance": settings.significance,
        "vantages": [{"name": one.name, "title": one.title, "sees": one.sees} for one in VANTAGES.values()],
    }


def _baseline(target: Target, settings: Settings, why: str) -> dict[str, Any]:
    """What can be told of membership without any model, which must be nothing."""
    held = target.federation.held
    found = why or baseline(held.units, held.members, settings.seed)
    if isinstance(found, str):
        return {"auc": None, "auc_interval": None, "at_chance": None, "why": found}
    return {
        "auc": found.ranking.auc,
        "auc_interval": list(found.ranking.auc_interval),
        "at_chance": found.at_chance,
        "why": "",
    }
