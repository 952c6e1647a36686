"""Whether a lie was noticed by the parties that should notice it."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.rig.attack import Attack
from protocols.rig.scene import SERVER, Refusal, Scene


@dataclass(frozen=True)
class Verdict:
    """Whether a lie was caught: by which party, at which stage, with which message.

    Where no party that had to notice did, `by` and `stage` are None, and `what` describes the events instead.
    """

    kind: str
    caught: bool
    by: str | None
    stage: str | None
    what: str


def verdict(scene: Scene, attack: Attack, exact: bool | None) -> Verdict:
    """Caught: every party noticed every lie that it had to notice, in the right stage and with the right error.

    Where an attack must not cost the others their sum, they must also have the exact sum.
    """
    noticed = [
        one for one in scene.refusals if isinstance(one.error, attack.error) and (one.who, one.stage) in scene.expected
    ]
    seen = {who: sum((one.who, one.stage) == who for one in noticed) for who in scene.expected}
    words = attack.outcome(scene) if attack.outcome is not None else ""
    caught = all(seen[who] >= times for who, times in scene.expected.items()) and bool(noticed or words)
    if scene.believed or (attack.exact and not exact):
        caught = False
    if words:
        return Verdict(attack.kind, caught, "the server", scene.stage_of(attack.stage), words)
    if not noticed:
        return Verdict(attack.kind, False, None, None, _instead(scene))
    missed = "" if caught else "; but not every party that had to notice did, or the others lost their sum"
    return Verdict(attack.kind, caught, _named(noticed), noticed[0].stage, noticed[0].error.what + missed)


def _named(refusals: list[Refusal]) -> str:
    if refusals[0].who == SERVER:
        return "the server"
    others = len({one.who for one in refusals}) - 1
    more = f" and {others} other{'s' if others > 1 else ''}" if others else ""
    return f"client {refusals[0].who}{more}"


def _instead(scene: Scene) -> str:
    other = scene.refusals[0] if scene.refusals else None
    if other is None:
        return "nobody noticed"
    who = "the server" if other.who == SERVER else f"client {other.who}"
    return f"no party that had to notice did; the first error, in stage {other.stage}, was raised by {who}: {other.error.what}"
