"""The values of settings with which a federation can run on separate machines.

Founding refuses others, and so does every node: a charter with others may come from a coordinator that lies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from secure_fed.config import RunConfig


class Fault(NamedTuple):
    """A setting with another value, the admitted values in words, and the reason."""

    setting: str
    value: Any
    limit: str
    why: str


def faults(config: RunConfig) -> Iterator[Fault]:
    for setting, (admitted, why) in _ADMITTED.items():
        section, name = setting.split(".")
        value = getattr(getattr(config, section), name)
        if value not in admitted:
            yield Fault(setting, value, " or ".join(map(repr, admitted)), why)


_ADMITTED: dict[str, tuple[tuple[object, ...], str]] = {
    "federation.sampling": (
        ("schedule", "fixed", "auto"),
        "draws clients by secret coins, and everybody who runs or watches the machines sees the draw",
    ),
    "federation.vanishing": ((0.0,), "makes clients of a simulation vanish"),
    "evaluation.per_client": ((False,), "needs the members' examples in one place"),
    "evaluation.non_members": (("",), "needs the members' examples in one place"),
    "evaluation.canaries": (("none",), "needs the members' examples in one place"),
    "evaluation.diagnostics": (((), ("variation",)), "needs the members' tensors in one place"),
    "method.personal": (((),), "is not kept by nodes yet"),
    "evaluation.audit_fraction": ((0.0,), "needs the members' examples in one place"),
    "privacy.on_exhausted": (
        ("refuse",),
        "plans fewer rounds than federation.rounds, and a member pays for the planned ones",
    ),
}
