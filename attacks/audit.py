"""An audit: all attacks from all vantage points on one run, and their comparison with the true members.

Attacks get a `Case`; `evidence.figures` gets their scores and the coins. An attack is made from the weakest vantage point that
allows it, and again from stronger ones that show it more. The vantage points in between repeat the figures of the weaker one.
Each 95 % interval of an AUC or rate holds by itself. Lower bounds, and the decision that something was found
(`evidence.verdict`), hold for all findings on membership together. One attack is the main one, chosen without scores
(`main_of`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from attacks.adversary.case import VANTAGES, Case, Finding, Inapplicable, Seen, Settings, Target, seen
from attacks.adversary.shadows import SharedReferences
from attacks.catalogue import Attack, attacks_named
from attacks.evidence import figures
from attacks.evidence.baseline import baseline
from attacks.evidence.figures import accusations, clients, exposed
from attacks.evidence.tradeoff import allowed, expected
from attacks.evidence.verdict import levels, main_of
from attacks.options import Say
from attacks.record import SCHEMA, AttackAt, AttackTitle, Audit, Baseline, Cell, Expected, Verdict
from attacks.report.display import Audited
from attacks.report.sentences import verdict
from secure_fed.errors import UsageError
from secure_fed.runs.assembly import Assembly

AUDIT, PAGE = "audit.json", "audit.html"
_PLAIN_SIGHT = {
    "secure_server": "this server invites clients to a sum by name, so it knows the membership of whole clients",
    "server": "this server gets every update with its client's name, so it knows the membership of whole clients",
}
_BESIDE_DUMMIES = {
    "secure_server": "dummy clients test the released model, not what this server sees",
    "server": "needs no test: this server sees whether each dummy client pulls",
}


def audited(
    target: Target,
    names: Sequence[str] = (),
    settings: Settings | None = None,
    *,
    show_texts: bool = False,
    progress: Say = lambda message: None,
) -> Audited:
    """The audit without a sweep; notebooks show it as a table. names: of attacks or files; empty: all."""
    settings, held = settings or Settings(), target.assembly.audit_pool
    attacks = attacks_named(names)
    why = held.why or ("" if 0 < held.members.sum() < len(held.members) else "all of the audit pool are on one side")
    made = findings(target, attacks, settings, why, progress, by_name=bool(names))
    judged = _judged(target, made, settings)
    main = main_of((where for where, one in judged.items() if one.ranking), list(VANTAGES))
    scores = judged[main].finding.scores if main else None
    result, terms = target.result, target.result.get("privacy") or {}
    audit = Audit(
        schema=SCHEMA,
        run_dir=str(target.run_dir) if target.run_dir else None,
        **{name: result.get(name) for name in ("method", "model", "data", "unit", "delta", "accuracy")},
        audited_unit=held.kind,
        audited_of=held.of,
        canaries="direction" if held.directions else target.assembly.config.evaluation.canaries,
        recorded=target.assembly.config.evaluation.record,
        rounds=target.final.round,
        references=settings.references,
        epsilon_promised=result.get("epsilon") if terms.get("private", False) else None,
        adjacency=terms.get("adjacency"),
        personal=tuple(target.assembly.server.personal),
        epsilon_accounted=accounted(result, "outsider", held.of),
        members=int(held.members.sum()),
        non_members=len(held.members) - int(held.members.sum()),
        significance=settings.significance,
        vantages=tuple(VANTAGES.values()),
        main=main,
        asked_for=tuple(one.name for one in attacks) if names else (),
        attacks=tuple(AttackTitle(one.name, one.title, one.paper) for one in attacks),
        cells=tuple(_cell(target, attack, vantage, made, judged) for attack in attacks for vantage in VANTAGES),
        roc={f"{at.attack}/{at.vantage}": one.curve for at, one in judged.items() if one.curve},
        baseline=_baseline(target, settings, why),
        # the units and clients that the main attack ranks highest, members and non-members
        clients=() if scores is None else tuple(clients(held, scores)),
        exposed=() if scores is None else tuple(exposed(target.assembly, scores, show_texts=show_texts)),
        accusations=() if scores is None else tuple(accusations(held, scores)),
        expected=_expected(target, main, judged),
        sweep=(),
        verdict=Verdict("unsupported", "", ""),  # until it is made, from the rest
    )
    return Audited(replace(audit, verdict=verdict(audit)))


Made = tuple[Finding, float]  # and the seconds that it took


def findings(
    target: Target, attacks: Sequence[Attack], settings: Settings, why: str, progress: Say, *, by_name: bool
) -> dict[AttackAt, Made | str]:
    """The finding of each attack at each vantage point that shows it more than the one before, or the reason why there is none.

    why: the reason why membership is unknown, else empty; by_name: the attacks were requested by name, so a failure is an
    error.
    """
    shadows = SharedReferences(
        target.assembly,
        settings.seed,
        lambda done, of: progress(f"reference adapters, round {done} of {of} of them all"),
        target.final.round,
    )
    averaged = target.assembly.config.federation.averaged > 1
    views = {name: seen(name, target.final.tensors, target.recorded, averaged=averaged) for name in VANTAGES}
    found: dict[AttackAt, Made | str] = {}
    for attack in attacks:
        progress(attack.title)
        before: Seen | None = None
        for vantage in list(VANTAGES)[list(VANTAGES).index(attack.vantage) :]:  # from the weakest that shows enough
            now = views[vantage]
            if before is not None:  # again only where it shows more sums or updates than the one before
                more = (len(now.sums), len(now.updates)) != (len(before.sums), len(before.updates))
                if not (more and vantage in attack.again):
                    continue
            nothing = why if attack.membership else ""
            case = Case(target.assembly, now, shadows)
            one = found[AttackAt(attack.name, vantage)] = nothing or _tried(attack, case, settings, by_name=by_name)
            before = None if isinstance(one, str) else now
    return found


def _tried(attack: Attack, case: Case, settings: Settings, *, by_name: bool) -> Made | str:
    """The finding of an attack; or the reason why it does not apply, which depends on no coins and no scores."""
    pool = case.assembly.audit_pool
    if why := plain_sight(attack, case.assembly, case.seen.vantage):
        return why
    if pool.directions and not attack.directions:
        if attack.membership and pool.of == "dummies":
            return "the audited units are dummy units, which hold nobody's data: there are no examples to look at"
        if pool.of == "data" and (attack.membership or pool.kind != "client"):
            return "the audited units are canaries of random direction, which learn nothing of their examples"
        directed = {unit.client for unit in case.units}  # the updates of canary clients contain no texts
        updates = [update for update in case.seen.updates if update.client not in directed]
        case = replace(case, seen=replace(case.seen, updates=updates))
    if attack.shadows and settings.references == 0:
        return "it needs reference adapters, each of which takes as long as the run: request them with --references 16"
    started = time.perf_counter()
    try:
        finding = attack.run(case, settings)
    except Inapplicable as error:
        return str(error)
    except UsageError as error:
        if by_name:
            raise
        return f"it failed: {error}"
    return finding, time.perf_counter() - started


def plain_sight(attack: Attack, assembly: Assembly, vantage: str) -> str:
    """The reason why this adversary needs no attack, since a server knows which clients take part; else empty."""
    known = _BESIDE_DUMMIES if assembly.audit_pool.of == "dummies" else _PLAIN_SIGHT
    return known.get(vantage, "") if attack.membership and assembly.audit_pool.kind == "client" else ""


def _judged(target: Target, made: Mapping[AttackAt, Made | str], settings: Settings) -> dict[AttackAt, figures.Judged]:
    """All findings compared with the true members; findings on membership share the significance."""
    found = {where: one[0] for where, one in made.items() if not isinstance(one, str)}
    scored = [where for where, one in found.items() if one.scores is not None]
    level = levels(settings.significance, scored, list(VANTAGES))
    result, members = target.result, target.assembly.audit_pool.members
    delta, releases = float(result.get("delta") or 0.0), result.get("releases") or None
    return {
        where: figures.judged(
            one,
            members,
            delta=delta,
            significance=level.get(where, settings.significance),
            seed=settings.seed,
            releases=releases,
        )
        for where, one in found.items()
    }


def _cell(
    target: Target,
    attack: Attack,
    vantage: str,
    made: Mapping[AttackAt, Made | str],
    judged: Mapping[AttackAt, figures.Judged],
) -> Cell:
    """The cell of an attack and a vantage point: its own finding, or the nearest weaker adversary's."""
    order = list(VANTAGES)
    if order.index(vantage) < order.index(attack.vantage):
        return Cell(attack.name, vantage, False, f"this adversary does not see {VANTAGES[attack.vantage].sees}")
    if why := plain_sight(attack, target.assembly, vantage):
        return Cell(attack.name, vantage, False, why)
    at = max(
        (at for at in made if at.attack == attack.name and order.index(at.vantage) <= order.index(vantage)),
        key=lambda at: order.index(at.vantage),
    )
    found = made[at]
    if isinstance(found, str):
        return Cell(attack.name, vantage, False, found)
    pool, result = target.assembly.audit_pool, target.result
    promised = accounted(result, vantage, pool.of)
    ceiling = allowed(result, promised) if promised is not None and pool.kind == result.get("unit") else None
    return figures.cell(attack.name, vantage, judged[at], found[1], promised, ceiling)


def accounted(result: Mapping[str, Any], vantage: str, of: str = "data") -> float | None:
    """The epsilon that a run guarantees against this adversary; None without a guarantee.

    Noise on the sum protects against adversaries that see the resulting models, but not against the server that adds it. Noise
    that each client adds also protects against the server, at the larger epsilon of a server that sees which clients take part.
    The audit's fellow client uses the models of all rounds and nothing else, which `epsilon` covers.

    A dummy's coin decides whether it sends its change or zeros; these two are neighbours under every guarantee. The coin of a
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


def _expected(target: Target, main: AttackAt | None, judged: Mapping[AttackAt, figures.Judged]) -> Expected | None:
    """The lower bound expected from the best possible attack in the main attack's place, if a guarantee covers it."""
    held, bound = target.assembly.audit_pool, judged[main].bound if main else None
    promised = accounted(target.result, main.vantage, held.of) if main else None
    if bound is None or promised is None or held.kind != target.result.get("unit"):
        return None
    return expected(target.result, promised, held.members, bound.significance)


def _baseline(target: Target, settings: Settings, why: str) -> Baseline:
    """The model-free baseline, which must be at chance."""
    held = target.assembly.audit_pool
    nobody = "dummy units hold nobody's data: they have no texts to be told apart by" if held.of == "dummies" else ""
    found = why or nobody or baseline(held.units, held.members, settings.seed)
    if isinstance(found, str):
        return Baseline(None, None, None, found)
    return Baseline(found.ranking.auc, found.ranking.auc_interval, found.at_chance, "")
