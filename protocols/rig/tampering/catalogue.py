"""Every lie that a simulation can try, by kind."""

from __future__ import annotations

from protocols.errors import ParameterError
from protocols.rig.attack import Attack
from protocols.rig.tampering.answers import ANSWERS
from protocols.rig.tampering.clients import CLIENTS
from protocols.rig.tampering.lists import LISTS
from protocols.rig.tampering.proposals import PROPOSALS
from protocols.rig.tampering.rosters import ROSTERS
from protocols.rig.tampering.vectors import VECTORS

ATTACKS: dict[str, Attack] = {
    attack.kind: attack for attack in (*VECTORS, *CLIENTS, *PROPOSALS, *ROSTERS, *LISTS, *ANSWERS)
}


def attack_of(kind: str) -> Attack:
    """The attack of this kind; ParameterError if there is none."""
    if kind not in ATTACKS:
        raise ParameterError(f"tamper is {kind!r:.80}: choose one of {', '.join(ATTACKS)}")
    return ATTACKS[kind]
