"""A masked vector is uniform to a party that lacks one of its masks; as many colluders as the threshold remove all masks.

Vectors that are not uniform fail by far, uniform ones hardly ever by chance. `test_masking` compares masks with the cipher.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from protocols.client import Keys
from protocols.keys import AgreementKey, Secret, pair_mask
from protocols.masking import add_masks
from protocols.wire import Masked, Opened, Survivors
from tests.protocols.sessions import Cast, Play, play
from tests.protocols.slow import interpolated

Words = NDArray[Any]  # uint32 or uint64

# The tests check about thirty uniform vectors, so fewer than one run in ten million fails by chance.
CHANCE, SURELY = 1e-9, 1e-12


def p_value(words: Words) -> float:
    """Of Pearson's test that the bytes at every place of a word are uniform, over all places (Bonferroni)."""
    columns = words.view(np.uint8).reshape(-1, words.itemsize).T
    found = [float(stats.chisquare(np.bincount(column, minlength=256)).pvalue) for column in columns]
    return min(1.0, min(found) * len(found))


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

    def strip(self, words: Words, client: int, known: Mapping[int, AgreementKey]) -> None:
        """Remove, in place, the masks that the client added for these others, given their private mask keys."""
        public, session = self.keys[client].mask.public, self.scene.cast.parameters.session
        add_masks(words, [pair_mask(key, public, session, me, client) for me, key in known.items()])

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


def session(made: Cast, silent: Collection[int] = ()) -> View:
    """A session played until the masked vectors are sent; the clients in `silent` send none."""
    keys = {me: Keys.new() for me in made.ids}
    clients = {me: made.client(me, _keys=keys[me]) for me in made.ids}
    scene = play(made, clients=clients, silent={"mask": silent}, until="unmask")
    held = {
        me: {owner: (share.seed.reveal(), share.key.reveal()) for owner, share in client._held.items()}
        for me, client in clients.items()
    }
    return View(scene, keys, held)


def guessed(shares: Mapping[int, bytes]) -> Secret:
    """The value at zero, which with fewer shares than the threshold is not the secret; zeros if it has more than 32 bytes."""
    found = interpolated(shares)
    return Secret(found[:32] if found[32] == 0 else bytes(32))


COUNT, THRESHOLD = 8, 5
BYTES = 1 << 20


@dataclass(frozen=True)
class Constant(Cast):
    """A cast in which every coordinate of every client's vector is `value`."""

    value: int = 0

    def vectors(self, seed: int = 0) -> dict[int, NDArray[Any]]:
        return {me: np.full(self.length, self.value, f"u{self.bits // 8}") for me in self.ids}


def constant(value: int = 0, bits: int = 32) -> Constant:
    return Constant(count=COUNT, threshold=THRESHOLD, bits=bits, length=8 * BYTES // bits, value=value)


@cache
def large() -> View:
    """A session with vectors of zeros; the last client deals its shares and sends no vector."""
    return session(constant(), silent=constant().ids[-1:])


@pytest.mark.parametrize(("bits", "value"), [(32, 0), (64, 2**64 - 1)])
def test_a_masked_vector_is_uniform(bits: int, value: int) -> None:
    made = constant(value, bits)
    victim = made.ids[2]
    view = large() if made == large().scene.cast else session(made)
    assert p_value(made.vectors()[victim]) < SURELY
    assert p_value(view.masked(victim)) > CHANCE


def test_after_all_is_opened_they_have_the_sum_of_the_honest_and_of_no_part_of_them() -> None:
    """With all seeds, a mask key and t - 1 colluders, the sum of one or two of three honest vectors is still uniform."""
    view = large()
    survivors, dropped, colluders = view.ids[:-1], view.ids[-1], view.ids[3 : 2 + THRESHOLD]
    assert len(colluders) == THRESHOLD - 1
    key = AgreementKey.from_secret(guessed(view.shares(dropped, 1, survivors[:THRESHOLD])))
    assert key.public == view.keys[dropped].mask.public
    stripped = {}
    for honest in (me for me in survivors if me not in colluders):
        words = stripped[honest] = view.masked(honest)
        holders = [me for me in survivors if me != honest][:THRESHOLD]
        add_masks(words, [(guessed(view.shares(honest, 0, holders)), -1)])
        view.strip(words, honest, {dropped: key, **{me: view.keys[me].mask for me in colluders}})
    assert len(stripped) == 3
    for some in [*itertools.combinations(stripped, 1), *itertools.combinations(stripped, 2)]:
        assert p_value(np.sum([stripped[me] for me in some], axis=0, dtype=np.uint32)) > CHANCE
    assert not np.sum(list(stripped.values()), axis=0, dtype=np.uint32).any()


def test_either_of_its_two_secrets_hides_a_vector() -> None:
    """With the mask key known, the self mask hides the vector. Without a self mask the same adversary reads the vector."""
    view, victim = large(), large().ids[0]
    words = view.masked(victim)
    view.strip_all(words, victim, view.keys[victim].mask)
    assert p_value(words) > CHANCE
    add_masks(words, [(view.keys[victim].seed, -1)])  # as if the victim had added no self mask
    assert p_value(words) < SURELY
    assert not words.any()


CLAIMS = [(c, lied) for c in range(COUNT) for lied in range(COUNT - c if c < THRESHOLD else 1)]


@pytest.mark.parametrize(("corrupt", "lied"), CLAIMS)
def test_a_server_that_lies_in_a_passive_session_needs_the_threshold_twice(corrupt: int, lied: int) -> None:
    """It tells some clients that the victim dropped out, the others that it did not, and so gets shares of both secrets."""
    view = session(Cast(count=COUNT, threshold=THRESHOLD, length=9))
    victim, colluders, honest = view.ids[0], view.ids[1 : 1 + corrupt], view.ids[1 + corrupt :]
    seeds, keys = view.shares(victim, 0, colluders), view.shares(victim, 1, colluders)
    for me in honest:
        listed = [other for other in view.ids if other != victim or me not in honest[:lied]]
        parameters = view.scene.cast.parameters
        answer = view.scene.clients[me].unmask(Survivors(tuple(listed)).to_bytes(parameters))
        opened = Opened.from_bytes(answer, parameters, me)
        for shares, of_all in ((seeds, opened.seeds), (keys, opened.keys)):
            if victim in of_all:
                shares[me] = of_all[victim]
    words = view.masked(victim)
    add_masks(words, [(guessed(seeds), -1)])
    view.strip_all(words, victim, AgreementKey.from_secret(guessed(keys)))
    read = words.tolist() == view.scene.vectors[victim].tolist()
    holders = COUNT - 1
    assert read == (corrupt + lied >= THRESHOLD and holders - lied >= THRESHOLD)
    assert not (read and holders + corrupt < 2 * THRESHOLD)
