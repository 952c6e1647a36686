"""A client's fresh secrets, how it deals them to its neighbours, and what it holds of theirs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from protocols.errors import Tampering
from protocols.keys import AgreementKey, Secret, channels, commitment, seal, unseal
from protocols.messages import SHARE, Advertise, Delivery, Shares
from protocols.parameters import Parameters
from protocols.shamir import split


@dataclass(frozen=True)
class Keys:
    """What a client makes anew for every session, from the operating system."""

    channel: AgreementKey
    mask: AgreementKey
    seed: Secret  # of its self mask
    draw: Secret  # its part of the joint randomness

    @classmethod
    def new(cls) -> Keys:
        return cls(AgreementKey.new(), AgreementKey.new(), Secret.new(), Secret.new())


@dataclass(frozen=True)
class Held:
    """One neighbour's shares. Of these two, one at most is ever opened."""

    seed: Secret
    key: Secret


def deal(
    parameters: Parameters, me: int, keys: Keys, neighbours: Mapping[int, Advertise]
) -> tuple[Shares, dict[int, Secret]]:
    """Shares of the seed and of the mask key for every neighbour, each pair sealed for its receiver alone.

    Also returns, by neighbour, the key of what that neighbour will send back.
    """
    session, holders = parameters.session, tuple(neighbours)
    seeds = split(keys.seed, parameters.threshold, holders)
    privates = split(keys.mask.private, parameters.threshold, holders)
    sealed: dict[int, bytes] = {}
    inbound: dict[int, Secret] = {}
    for holder, advert in neighbours.items():
        outbound, inbound[holder] = channels(keys.channel, advert.channel, session, me, holder)
        sealed[holder] = seal(outbound, seeds[holder] + privates[holder], session, me, holder)
    return Shares(commitment(keys.seed, session, "seed", me), sealed), inbound


def collect(delivery: Delivery, inbound: Mapping[int, Secret], session: bytes, me: int) -> dict[int, Held]:
    """What the neighbours dealt to `me`, by owner. Tampering if it is a stranger's, or not what the owner sealed."""
    strangers = delivery.sealed.keys() - inbound.keys()
    if strangers:
        raise Tampering(f"shares were delivered of client {min(strangers)}, which is no neighbour")
    held: dict[int, Held] = {}
    for owner, sealed in delivery.sealed.items():
        opened = unseal(inbound[owner], sealed, session, owner, me)
        held[owner] = Held(Secret(opened[:SHARE]), Secret(opened[SHARE:]))
    return held
