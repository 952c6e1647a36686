"""The view of a server that colludes with some clients: it removes masks and rebuilds secrets from shares."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from protocols.client import Keys
from protocols.keys import AgreementKey, Secret, pair_mask
from protocols.masking import add_masks
from protocols.wire import Masked
from tests.protocols.randomness import Words
from tests.protocols.sessions import Cast, Play, play

PRIME = 2**256 + 297


@dataclass(frozen=True)
class View:
    """A session with all its secrets, and the computations of a server that colludes with some clients."""

    scene: Play
    keys: Mapping[int, Keys]
    held: Mapping[int, Mapping[int, tuple[bytes, bytes]]]  # by holder, by owner: shares of seed and mask key

    @property
    def ids(self) -> tuple[int, ...]:
        return self.scene.cast.ids

    def masked(self, client: int) -> Words:
        """(length,) a copy of the client's masked vector, as the server received it."""
        return Masked.from_bytes(self.scene.said["mask", client], self.scene.cast.parameters, client).vector.copy()

    def strip(self, words: Words, client: int, known: Iterable[AgreementKey], others: Iterable[int]) -> None:
        """Remove, in place, the masks that the client added for `others`, given the private mask keys `known` of the others."""
        public, session = self.keys[client].mask.public, self.scene.cast.parameters.session
        add_masks(words, [pair_mask(key, public, session, me, client) for key, me in zip(known, others, strict=True)])

    def strip_colluders(self, words: Words, client: int, colluders: Collection[int]) -> None:
        self.strip(words, client, [self.keys[me].mask for me in colluders], colluders)

    def strip_all(self, words: Words, client: int, key: AgreementKey) -> None:
        """Remove, in place, all of the client's pair masks, given the client's own mask key."""
        session = self.scene.cast.parameters.session
        for other in self.ids:
            if other != client:
                mask, sign = pair_mask(key, self.keys[other].mask.public, session, client, other)
                add_masks(words, [(mask, -sign)])

    def shares(self, owner: int, which: int, holders: Collection[int]) -> dict[int, bytes]:
        """These holders' shares of the owner's seed (which = 0) or mask key (which = 1), by holder."""
        return {holder: self.held[holder][owner][which] for holder in holders}


def session(made: Cast, keys: Mapping[int, Keys] | None = None, silent: Collection[int] = ()) -> View:
    """A session played until the masked vectors are sent; the clients in `silent` send none."""
    keys = keys or {me: Keys.new() for me in made.ids}
    clients = {me: made.client(me, _keys=keys[me]) for me in made.ids}
    scene = play(made, clients=clients, silent={"mask": silent}, until="unmask")
    held = {
        me: {owner: (share.seed.reveal(), share.key.reveal()) for owner, share in client._held.items()}
        for me, client in clients.items()
    }
    return View(scene, keys, held)


def rebuilt(shares: Mapping[int, bytes]) -> Secret | None:
    """The secret by Lagrange's formula at zero; None if the value does not fit 32 bytes."""
    points = {holder + 1: int.from_bytes(share, "little") for holder, share in shares.items()}
    total = 0
    for place, value in points.items():
        for other in points.keys() - {place}:
            value = value * other * pow(other - place, -1, PRIME) % PRIME
        total += value
    found = total % PRIME
    return Secret(found.to_bytes(32, "little")) if found < 2**256 else None


def guessed(shares: Mapping[int, bytes]) -> Secret:
    """`rebuilt`, or 32 zero bytes where it is None. With fewer shares than the threshold the result is not the secret."""
    return rebuilt(shares) or Secret(bytes(32))
