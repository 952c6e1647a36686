"""A client's fresh secrets, how it deals shares of them to its neighbours, and the shares that it holds of theirs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protocols.agreements import Agreements
from protocols.chosen import Chosen
from protocols.errors import Aborted, Tampering
from protocols.keys import AgreementKey, Secret, commitment, seal, unseal
from protocols.messages import SHARE, Advertise, Delivery, Shares
from protocols.parameters import Parameters
from protocols.roster import Topology
from protocols.shamir import split_each


@dataclass(frozen=True)
class Keys:
    """A client's secrets, fresh for every session, from the operating system."""

    channel: AgreementKey
    mask: AgreementKey
    seed: Secret  # of the self mask
    choice: Secret  # the seed of its choice of neighbours, secret until it is advertised

    @classmethod
    def new(cls) -> Keys:
        return cls(AgreementKey.new(), AgreementKey.new(), Secret.new(), Secret.new())


@dataclass(frozen=True)
class Held:
    """One neighbour's shares. At most one of the two is ever opened."""

    seed: Secret
    key: Secret


def deal(
    parameters: Parameters,
    me: int,
    keys: Keys,
    adverts: Mapping[int, Advertise],
    holders: Sequence[int],
    agreements: Agreements,
) -> tuple[Shares, dict[int, Secret]]:
    """Shares of the seed and of the mask key for every holder, each pair sealed so that only its receiver can read it.

    Also returns, for every client in `adverts`, the key for messages from it.
    """
    session = parameters.session
    seeds, privates = split_each((keys.seed, keys.mask.private), parameters.threshold, holders)
    publics = {other: advert.channel for other, advert in adverts.items()}
    channels = agreements.channels(keys.channel, publics, session, me)
    sealed = {
        other: seal(channels[other][0], seed + privates[other], session, me, other) for other, seed in seeds.items()
    }
    inbound = {other: channel[1] for other, channel in channels.items()}
    return Shares(commitment(keys.seed, session, "seed", me), sealed), inbound


def check_dealt(
    delivery: Delivery, me: int, mine: bytes, adverts: Mapping[int, Advertise], graph: Topology, parameters: Parameters
) -> None:
    """In an active session, check the list of the clients that have dealt.

    Tampering unless it agrees with this client's own choice and with the advertised choices of the clients near it, and comes
    with the shares of every owner whose shares this client is to hold; Aborted if too few have dealt.
    """
    dealt = delivery.dealt
    if dealt.get(me) != mine:
        raise Tampering(
            "the list of clients that dealt shares leaves this client out, or has another choice of neighbours for it than it "
            "advertised"
        )
    for other in {*graph.partners(me), *graph.owners(me), *graph.holders(me)}:
        if other not in adverts:
            raise Tampering(f"client {other} is a neighbour of this client, and its keys were not on the roster")
        if adverts[other].choice != dealt[other]:
            raise Tampering(f"client {other} is listed with another choice of neighbours than it advertised")
    if set(delivery.sealed) != set(graph.owners(me)):
        raise Tampering("the delivered shares are not from exactly the clients listed as having dealt them")
    if len(dealt) < parameters.survivors:
        raise Aborted(
            f"{len(dealt)} clients have dealt shares, and no sum of fewer than {parameters.survivors} is opened"
        )
    if isinstance(graph, Chosen):
        graph.require_partners(me, dealt, parameters.partners)


def collect(delivery: Delivery, inbound: Mapping[int, Secret], session: bytes, me: int) -> dict[int, Held]:
    """The shares dealt to `me`, by owner. Tampering if they are a stranger's, or not as the owner sealed them."""
    strangers = delivery.sealed.keys() - inbound.keys()
    if strangers:
        raise Tampering(f"shares of client {min(strangers)}, which is no neighbour, were delivered")
    held: dict[int, Held] = {}
    for owner, sealed in delivery.sealed.items():
        opened = unseal(inbound[owner], sealed, session, owner, me)
        held[owner] = Held(Secret(opened[:SHARE]), Secret(opened[SHARE:]))
    return held
