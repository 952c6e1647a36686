"""A masked vector is uniform to a party that lacks one of its masks; as many colluders as the threshold remove all masks.

Vectors that are not uniform fail by far; uniform vectors hardly ever fail by chance (see `randomness`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from protocols.client import Keys
from protocols.keys import AgreementKey, Secret
from protocols.masking import add_masks
from protocols.sharing import split
from protocols.wire import Opened, Survivors
from tests.protocols.adversary import View, guessed, session
from tests.protocols.randomness import CHANCE, SURELY, Words, p_value
from tests.protocols.sessions import Cast

COUNT, THRESHOLD = 8, 5
BYTES = 1 << 21


@dataclass(frozen=True)
class Constant(Cast):
    """A cast in which every coordinate of every client's vector is `value`."""

    value: int = 0

    def vectors(self, seed: int = 0) -> dict[int, NDArray[Any]]:
        return {me: np.full(self.length, self.value, f"u{self.bits // 8}") for me in self.ids}


def constant(value: int = 0, bits: int = 32, size: int = BYTES, **options: Any) -> Constant:
    return Constant(count=COUNT, threshold=THRESHOLD, bits=bits, length=8 * size // bits, value=value, **options)


@cache
def large() -> View:
    """A session with vectors of zeros; the last client deals its shares and sends no vector."""
    made = constant()
    return session(made, silent=made.ids[-1:])


def added(vectors: Sequence[Words]) -> Words:
    """The sum modulo 2^bits."""
    total: Words = np.sum(vectors, axis=0, dtype=vectors[0].dtype)
    return total


# --- uniform to the server, alone or with fewer colluders than the threshold


@pytest.mark.parametrize(("bits", "value"), [(32, 0), (64, 2**64 - 1)])
def test_a_masked_vector_is_uniform(bits: int, value: int) -> None:
    made = constant(value, bits)
    victim = made.ids[2]
    view = large() if made == large().scene.cast else session(made)
    assert p_value(made.vectors()[victim]) < SURELY
    assert p_value(view.masked(victim)) > CHANCE


def test_before_anything_is_opened_fewer_than_the_threshold_cannot_take_the_masks_off() -> None:
    """The colluders' pair masks are removed; the values that their shares interpolate to remove no other mask."""
    view, victim = large(), large().ids[0]
    colluders = view.ids[1:THRESHOLD]
    words = view.masked(victim)
    view.strip_colluders(words, victim, colluders)
    assert p_value(words) > CHANCE
    seed, key = (guessed(view.shares(victim, which, colluders)) for which in (0, 1))
    add_masks(words, [(seed, -1)])
    view.strip_all(words, victim, AgreementKey.from_secret(key))
    assert p_value(words) > CHANCE


def test_after_all_is_opened_they_have_the_sum_of_the_honest_and_of_no_part_of_them() -> None:
    """The server rebuilds all seeds and the mask key of the client that dropped out; t - 1 clients give it all their secrets.

    Three honest clients are left. The sum of the vectors of one or two of them is still uniform.
    """
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
        view.strip(words, honest, [key], [dropped])
        view.strip_colluders(words, honest, colluders)
    assert len(stripped) == 3
    for some in [*itertools.combinations(stripped, 1), *itertools.combinations(stripped, 2)]:
        assert p_value(added([stripped[me] for me in some])) > CHANCE
    assert not added(list(stripped.values())).any()


def test_either_of_its_two_secrets_hides_a_vector() -> None:
    """With the mask key known, the self mask hides the vector. Without a self mask the same adversary reads the vector."""
    view, victim = large(), large().ids[0]
    words = view.masked(victim)
    view.strip_all(words, victim, view.keys[victim].mask)
    assert p_value(words) > CHANCE
    add_masks(words, [(view.keys[victim].seed, -1)])  # as if the victim had added no self mask
    assert p_value(words) < SURELY
    assert not words.any()


def test_shares_below_the_threshold_are_uniform_whatever_they_are_shares_of() -> None:
    """Each of two shares is uniform, and so is their interpolation at zero. With a third share it is the secret."""
    secret, holders = Secret(bytes(32)), (3, 8, 20)
    dealt = [split(secret, 3, holders) for _ in range(8_192)]
    for holder in holders[:2]:
        assert p_value(numbers([shares[holder][:32] for shares in dealt])) > CHANCE
    below = [guessed({me: shares[me] for me in holders[:2]}).reveal() for shares in dealt]
    assert p_value(numbers(below)) > CHANCE
    assert p_value(numbers([guessed(shares).reveal() for shares in dealt])) < SURELY


def numbers(parts: Sequence[bytes]) -> Words:
    return np.frombuffer(b"".join(parts), np.uint32)


# --- at the threshold


def small() -> Cast:
    return Cast(count=COUNT, threshold=THRESHOLD, length=9)


@pytest.mark.parametrize("count", range(1, COUNT))
def test_colluders_read_a_vector_from_the_threshold_on(count: int) -> None:
    """Nobody lies: each colluder holds shares of both secrets, and as many colluders as the threshold rebuild both."""
    view = session(small())
    victim, colluders = view.ids[0], view.ids[1 : 1 + count]
    words = view.masked(victim)
    seed, key = (guessed(view.shares(victim, which, colluders)) for which in (0, 1))
    add_masks(words, [(seed, -1)])
    view.strip_all(words, victim, AgreementKey.from_secret(key))
    assert (words.tolist() == view.scene.vectors[victim].tolist()) == (count >= THRESHOLD)


CLAIMS = [(c, lied) for c in range(THRESHOLD) for lied in range(COUNT - c)]


@pytest.mark.parametrize(("corrupt", "lied"), CLAIMS)
def test_a_server_that_lies_in_a_passive_session_needs_the_threshold_twice(corrupt: int, lied: int) -> None:
    """It tells `lied` honest clients that the victim dropped out, the others that it did not, and gets shares of both secrets.

    The c colluders hold shares of both. With c + lied >= t shares of the key and h - lied >= t shares of the seed the server
    reads the vector, so passive sessions protect only against an honest server. Where 2 t > h + c, as active sessions require,
    it cannot get both.
    """
    view = session(small())
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


def test_the_claims_above_have_all_outcomes() -> None:
    assert any(c + lied >= THRESHOLD and COUNT - 1 - lied >= THRESHOLD for c, lied in CLAIMS)
    assert any(c + lied < THRESHOLD for c, lied in CLAIMS)
    assert any(COUNT - 1 + c < 2 * THRESHOLD for c, _ in CLAIMS)


# --- masks used twice


def test_masks_used_twice_show_the_difference_of_two_vectors() -> None:
    """The same keys are used twice in the same session. In another session they give other masks, and so do new keys."""
    made, later = constant(3, size=1 << 20), constant(5, size=1 << 20)
    keys = {me: Keys.new() for me in made.ids}
    victim = made.ids[1]
    first, again = session(made, keys).masked(victim), session(later, keys).masked(victim)
    assert p_value(again - first) < SURELY
    assert set((again - first).tolist()) == {2}
    assert p_value(session(replace(later, run="the next round"), keys).masked(victim) - first) > CHANCE
    assert p_value(session(later).masked(victim) - first) > CHANCE
