"""Attacks on a run, each from the weakest vantage point that allows it, and again from stronger ones that show it more."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from attacks.adversary.case import Case, Finding, Inapplicable, Settings, Shadows
from attacks.adversary.target import Target
from attacks.adversary.vantage import VANTAGES, Seen, seen
from attacks.catalogue import Attack
from secure_fed.errors import UsageError
from secure_fed.runs.assembly import Assembly

_PLAIN_SIGHT = {
    "secure_server": "this server invites clients to a sum by name, so it knows the membership of whole clients",
    "server": "this server gets every update with its client's name, so it knows the membership of whole clients",
}
_BESIDE_PHANTOMS = {
    "secure_server": "phantoms test the released model, not what this server sees",
    "server": "needs no test: this server sees whether each phantom pulls",
}
Progress = Callable[[str], None]
Where = tuple[str, str]  # an attack and a vantage point


@dataclass(frozen=True)
class Made:
    """A finding, and its computation time."""

    finding: Finding
    seconds: float


def findings(
    target: Target, attacks: Sequence[Attack], settings: Settings, why: str, progress: Progress, *, by_name: bool
) -> dict[Where, Made | str]:
    """The finding of each attack at each vantage point that shows it more than the one before, or the reason why there is none.

    why: the reason why membership is unknown, else empty; by_name: the attacks were requested by name, so a failure is an
    error.
    """
    shadows = Shadows(
        target.assembly,
        settings.seed,
        lambda done, of: progress(f"reference adapters, round {done} of {of} of them all"),
        target.final.round,
    )
    averaged = target.assembly.config.federation.averaged > 1
    views = {name: seen(name, target.final.tensors, target.recorded, averaged=averaged) for name in VANTAGES}
    found: dict[Where, Made | str] = {}
    for attack in attacks:
        progress(attack.title)
        before: Seen | None = None
        for vantage in list(VANTAGES)[list(VANTAGES).index(attack.vantage) :]:  # from the weakest that shows enough
            now = views[vantage]
            if before is not None and not _sees_more(attack, before, now):
                continue
            nothing = why if attack.membership else ""
            case = Case(target.assembly, now, shadows)
            one = found[attack.name, vantage] = nothing or _tried(attack, case, settings, by_name=by_name)
            before = None if isinstance(one, str) else now
    return found


def _sees_more(attack: Attack, before: Seen, now: Seen) -> bool:
    """Whether the attack is repeated at this vantage point and it shows more sums or updates than the one before."""
    more = (len(now.sums), len(now.updates)) != (len(before.sums), len(before.updates))
    return more and now.vantage in attack.again


def _tried(attack: Attack, case: Case, settings: Settings, *, by_name: bool) -> Made | str:
    """The finding of an attack; or the reason why it does not apply, which depends on no coins and no scores."""
    if in_plain_sight(attack, case.assembly, case.seen.vantage):
        return plain_sight(case.seen.vantage, case.assembly)
    if case.assembly.audit_pool.directions and not attack.directions:
        if attack.membership and case.assembly.audit_pool.of == "phantoms":
            return "the audited units are phantoms, which are nobody's data: they have no examples to look at"
        if case.assembly.audit_pool.of == "data" and (attack.membership or case.assembly.audit_pool.kind != "client"):
            return "the audited units are canaries of random direction, which learn nothing of their examples"
    if not attack.directions:
        case = _of_those_who_learn(case)
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
    return Made(finding, time.perf_counter() - started)


def _of_those_who_learn(case: Case) -> Case:
    """The case without the updates of canary clients that move along a direction, because these contain no texts."""
    canaries = {one.name for one in case.assembly.phantoms}
    if case.assembly.audit_pool.directions:
        canaries |= {unit.client for unit in case.units}
    updates = [update for update in case.seen.updates if update.client not in canaries]
    return replace(case, seen=replace(case.seen, updates=updates))


def plain_sight(vantage: str, assembly: Assembly) -> str:
    """The reason why no attack on whole clients is made at this server."""
    return (_BESIDE_PHANTOMS if assembly.audit_pool.of == "phantoms" else _PLAIN_SIGHT)[vantage]


def in_plain_sight(attack: Attack, assembly: Assembly, vantage: str) -> bool:
    """Whether this adversary needs no attack: a server knows which clients take part."""
    return attack.membership and assembly.audit_pool.kind == "client" and vantage in ("secure_server", "server")
