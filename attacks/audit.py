"""An audit: all attacks from all vantage points on one run, and their comparison with the true members.

Attacks get a `Case`; `judge` gets their scores and the coins. An attack is made from the weakest vantage point that allows it,
and again from stronger ones that show it more. The vantage points in between repeat the figures of the weaker one. Each 95 %
interval of an AUC or rate holds by itself. Lower bounds, and the decision that something was found (`report.significance`),
hold for all findings on membership together. One attack is the main one, chosen without scores (`main_attack`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attacks.adversary.case import Settings
from attacks.adversary.target import Target
from attacks.adversary.vantage import VANTAGES
from attacks.catalogue import ATTACKS, Attack, from_file
from attacks.evidence import judge
from attacks.evidence.allowed import allowed
from attacks.evidence.baseline import baseline
from attacks.evidence.expected import expected
from attacks.evidence.exposure import accusations, clients, exposed
from attacks.evidence.main_attack import levels, main_of
from attacks.report.notebook import Audited
from attacks.report.verdict import verdict
from attacks.run_attacks import Made, Progress, Where, findings, in_plain_sight, plain_sight
from secure_fed.errors import ConfigError
from secure_fed.runs.assembly import Assembly

SCHEMA = 1
AUDIT, PAGE = "audit.json", "audit.html"


def chosen(names: Iterable[str]) -> list[Attack]:
    """The attacks with these names or file paths (`catalogue.from_file`), each once; without names, all listed attacks."""
    found = {one.name: one for one in map(_named, names or ATTACKS)}
    return list(found.values())


def _named(name: str) -> Attack:
    if name.endswith(".py"):
        return from_file(Path(name))
    if name not in ATTACKS:
        raise ConfigError(
            f"--attack is {name!r}, but the attacks are {', '.join(ATTACKS)}, or the path of a .py file of yours",
            setting="--attack",
            value=name,
        )
    return ATTACKS[name]


def audited(
    target: Target,
    names: Sequence[str] = (),
    settings: Settings | None = None,
    *,
    show_texts: bool = False,
    progress: Progress = lambda message: None,
) -> Audited:
    """The content of `audit.json` without a sweep; notebooks show it as a table. names: of attacks or files; empty: all."""
    settings, held = settings or Settings(), target.assembly.audit_pool
    attacks = chosen(names)
    why = held.why or ("" if 0 < held.members.sum() < len(held.members) else "all of the audit pool are on one side")
    made = findings(target, attacks, settings, why, progress, by_name=bool(names))
    judged = _judged(target, made, settings)
    main = main_of((where for where, one in judged.items() if one.ranking), list(VANTAGES))
    audit = _header(target, settings) | {
        "main": main and {"attack": main[0], "vantage": main[1]},
        "asked_for": [one.name for one in attacks] if names else [],
        "attacks": [{"name": one.name, "title": one.title, "paper": one.paper} for one in attacks],
        "cells": [_cell(target, attack, vantage, made, judged) for attack in attacks for vantage in VANTAGES],
        "roc": {f"{name}/{vantage}": one.curve for (name, vantage), one in judged.items() if one.ranking},
        "baseline": _baseline(target, settings, why),
        **_standing_out(target.assembly, judged[main] if main else None, show_texts=show_texts),
        "expected": _expected(target, main, judged),
        "sweep": [],
    }
    return Audited(audit | {"verdict": verdict(audit)})


def _judged(target: Target, made: Mapping[Where, Made | str], settings: Settings) -> dict[Where, judge.Judged]:
    """All findings compared with the true members; findings on membership share the significance."""
    found = {where: one.finding for where, one in made.items() if isinstance(one, Made)}
    scored = [where for where, one in found.items() if one.scores is not None]
    level = levels(settings.significance, scored, list(VANTAGES))
    result, members = target.result, target.assembly.audit_pool.members
    delta, releases = float(result.get("delta") or 0.0), result.get("releases") or None
    return {
        where: judge.judged(
            one,
            members,
            delta=delta,
            significance=level.get(where, settings.significance),
            seed=settings.seed,
            releases=releases,
        )
        for where, one in found.items()
    }


def _standing_out(assembly: Assembly, main: judge.Judged | None, *, show_texts: bool) -> dict[str, Any]:
    """The units and clients that the main attack ranks highest, members and non-members."""
    if main is None or main.finding.scores is None:
        return {"clients": [], "exposed": [], "accusations": []}
    scores = main.finding.scores
    return {
        "clients": clients(assembly.audit_pool, scores),
        "exposed": exposed(assembly, scores, show_texts=show_texts),
        "accusations": accusations(assembly.audit_pool, scores),
    }


def _cell(
    target: Target,
    attack: Attack,
    vantage: str,
    made: Mapping[Where, Made | str],
    judged: Mapping[Where, judge.Judged],
) -> dict[str, Any]:
    """The cell of an attack and a vantage point: its own finding, or the nearest weaker adversary's."""
    order = list(VANTAGES)
    if order.index(vantage) < order.index(attack.vantage):
        return judge.empty(attack.name, vantage, f"this adversary does not see {VANTAGES[attack.vantage].sees}")
    if in_plain_sight(attack, target.assembly, vantage):
        return judge.empty(attack.name, vantage, plain_sight(vantage, target.assembly))
    at = max(
        (at for name, at in made if name == attack.name and order.index(at) <= order.index(vantage)), key=order.index
    )
    found = made[attack.name, at]
    if isinstance(found, str):
        return judge.empty(attack.name, vantage, found)
    promised = accounted(target.result, vantage, target.assembly.audit_pool.of)
    limit = None if promised is None or target.assembly.audit_pool.kind != target.result.get("unit") else promised
    ceiling = None if limit is None else allowed(target.result, limit)
    return judge.cell(attack.name, vantage, judged[attack.name, at], found.seconds, promised, ceiling)


def accounted(result: Mapping[str, Any], vantage: str, of: str = "data") -> float | None:
    """The epsilon that a run guarantees against this adversary; None without a guarantee.

    Noise on the sum protects against adversaries that see the resulting models, but not against the server that adds it. Noise
    that each client adds also protects against the server, at the larger epsilon of a server that sees which clients take part.
    The audit's fellow client uses the models of all rounds and nothing else, which `epsilon` covers.

    A phantom's coin decides whether it sends its change or zeros; these two are neighbours under every guarantee. The coin of a
    unit of the data removes the unit. Data sets with and without the unit are not neighbours under guarantees where a unit is
    replaced by another, or (with shares of noise) stays and sends only its noise.
    """
    terms = result.get("privacy")
    if not terms or not terms.get("private", False):
        return None
    if of == "data" and ("replaced" in str(terms.get("adjacency")) or terms.get("place") == "shares"):
        return None
    if vantage in ("outsider", "fellow_client"):
        return float(result["epsilon"])
    return None if terms.get("place") == "sum" else float(result["epsilon_participants"])


def _header(target: Target, settings: Settings) -> dict[str, Any]:
    held, result = target.assembly.audit_pool, target.result
    terms = result.get("privacy") or {}
    return {
        "schema": SCHEMA,
        "run_dir": str(target.run_dir) if target.run_dir else None,
        **{name: result.get(name) for name in ("method", "model", "data", "unit", "delta", "accuracy")},
        "audited_unit": held.kind,
        "audited_of": held.of,
        "canaries": "direction" if held.directions else target.assembly.config.evaluation.canaries,
        "recorded": target.assembly.config.evaluation.record,
        "rounds": target.final.round,
        "references": settings.references,
        "epsilon_promised": result.get("epsilon") if terms.get("private", False) else None,
        "adjacency": terms.get("adjacency"),
        "personal": list(target.assembly.server.personal),
        "epsilon_accounted": accounted(result, "outsider", held.of),
        "members": int(held.members.sum()),
        "non_members": len(held.members) - int(held.members.sum()),
        "significance": settings.significance,
        "vantages": [{"name": one.name, "title": one.title, "sees": one.sees} for one in VANTAGES.values()],
    }


def _expected(target: Target, main: Where | None, judged: Mapping[Where, judge.Judged]) -> dict[str, Any] | None:
    """The lower bound expected from the best possible attack in the main attack's place, if a guarantee covers it."""
    held, bound = target.assembly.audit_pool, judged[main].bound if main else None
    promised = accounted(target.result, main[1], held.of) if main else None
    if bound is None or promised is None or held.kind != target.result.get("unit"):
        return None
    return expected(target.result, promised, held.members, bound.significance)


def _baseline(target: Target, settings: Settings, why: str) -> dict[str, Any]:
    """The model-free baseline, which must be at chance."""
    held = target.assembly.audit_pool
    nobody = "phantoms are nobody's data: they have no texts to be told apart by" if held.of == "phantoms" else ""
    found = why or nobody or baseline(held.units, held.members, settings.seed)
    if isinstance(found, str):
        return {"auc": None, "auc_interval": None, "at_chance": None, "why": found}
    return {
        "auc": found.ranking.auc,
        "auc_interval": list(found.ranking.auc_interval),
        "at_chance": found.at_chance,
        "why": "",
    }
