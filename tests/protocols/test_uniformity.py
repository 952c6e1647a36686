"""A masked vector is uniform to a party that lacks one of its masks; as many colluders as the threshold remove all masks.

First the statistics of uniformity, each of which notices the fault it is for: vectors that are not uniform fail by far, uniform
ones hardly ever fail by chance. Then the view of a server that colludes with some clients.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
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
LAGS = (1, 2, 3, 4, 8, 64, 1024, 32768)
BLOCK = 16  # bytes of the cipher


def p_values(words: Words) -> dict[str, float]:
    """The p-value of each statistic. A constant vector has zeros among them."""
    octets = words.view(np.uint8)
    return {
        "bytes at each place of a word": _all(_counts(column, 256) for column in octets.reshape(-1, words.itemsize).T),
        "bits at each place of a word": _bits(words),
        "serial correlation": _serial(words),
        "repeated blocks": _repeats(octets),
    }


def p_value(words: Words) -> float:
    """The p-value of all statistics together (Bonferroni): for uniform words it is below p with probability at most p."""
    return _all(p_values(words).values())


def _all(values: Any) -> float:
    found = [float(value) for value in values]
    return min(1.0, min(found) * len(found))


def _counts(values: NDArray[Any], bins: int) -> float:
    return float(stats.chisquare(np.bincount(values, minlength=bins)).pvalue)


def _bits(words: Words) -> float:
    """Ones at each bit position: the sum of the squared standardised deviations from one half has a chi-square distribution."""
    bits = 8 * words.itemsize
    ones = np.array([int(((words >> words.dtype.type(place)) & words.dtype.type(1)).sum()) for place in range(bits)])
    deviations = (2 * ones - len(words)) / np.sqrt(len(words))
    return float(stats.chi2.sf((deviations**2).sum(), bits))


def _serial(words: Words) -> float:
    """The correlation of words `lag` places apart is approximately normal, with variance 1 / n."""
    return _all(_correlated(words[:-lag], words[lag:]) for lag in LAGS)


def _correlated(first: Words, second: Words) -> float:
    width = 2.0 ** (8 * first.itemsize)
    left, right = (part.astype(np.float64) / width - 0.5 for part in (first, second))
    # the mean product of n independent pairs of centred uniform numbers has variance (1/12)^2 / n
    return float(2 * stats.norm.sf(abs(left @ right) / len(left) * 12 * np.sqrt(len(left))))


def _repeats(octets: NDArray[np.uint8]) -> float:
    """Among n uniform blocks of 16 bytes two are equal with probability at most n^2 / 2^129."""
    halves = octets[: len(octets) // BLOCK * BLOCK].view("<u8").reshape(-1, 2)
    order = np.lexsort(halves.T)
    same = (halves[order[1:]] == halves[order[:-1]]).all(axis=1).any()
    return len(halves) ** 2 / 2.0**129 if same else 1.0


def uniform_words(count: int = 1 << 18) -> NDArray[np.uint32]:
    return np.frombuffer(random.SystemRandom().randbytes(4 * count), np.uint32).copy()


BROKEN: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "bytes at each place of a word": lambda words: np.where(words >> 24 == 9, words ^ (1 << 24), words),
    "bits at each place of a word": lambda words: words | np.where(np.arange(len(words)) % 16, 0, 1 << 13),
    "serial correlation": lambda words: np.concatenate(
        (words[:4096], words[4096:] // 2 + words[4096 - 1024 : -1024] // 2)
    ),
    "repeated blocks": lambda words: np.concatenate((words[: len(words) // 2], words[: len(words) // 2])),
}


@pytest.mark.parametrize("statistic", BROKEN)
def test_each_statistic_notices_what_it_is_for(statistic: str) -> None:
    broken = BROKEN[statistic](uniform_words()).astype(np.uint32)
    assert p_values(broken)[statistic] < SURELY
    assert p_value(broken) < 10 * SURELY


@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_the_entropy_of_the_operating_system_passes(kind: type) -> None:
    words: NDArray[Any] = np.frombuffer(os.urandom(1 << 21), kind)
    assert p_value(words) > CHANCE


@pytest.mark.nightly
@pytest.mark.parametrize(("vectors", "below_a_hundredth", "below_a_half"), [(40, 8, 38), (200, 15, 150)])
def test_uniform_words_fail_as_seldom_as_is_said(vectors: int, below_a_hundredth: int, below_a_half: int) -> None:
    """One p-value in a hundred is below 0.01, many more if p-values are too small. Reaching a limit has a chance below 1e-8."""
    found = [p_value(uniform_words(1 << 16)) for _ in range(vectors)]
    assert sum(value < 0.01 for value in found) < below_a_hundredth
    assert sum(value < 0.5 for value in found) < below_a_half


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


def constant(value: int = 0, bits: int = 32, size: int = BYTES, **options: Any) -> Constant:
    return Constant(count=COUNT, threshold=THRESHOLD, bits=bits, length=8 * size // bits, value=value, **options)


@cache
def large() -> View:
    """A session with vectors of zeros; the last client deals its shares and sends no vector."""
    made = constant()
    return session(made, silent=made.ids[-1:])


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


# --- at the threshold


CLAIMS = [(c, lied) for c in range(COUNT) for lied in range(COUNT - c if c < THRESHOLD else 1)]


@pytest.mark.parametrize(("corrupt", "lied"), CLAIMS)
def test_a_server_that_lies_in_a_passive_session_needs_the_threshold_twice(corrupt: int, lied: int) -> None:
    """It tells `lied` honest clients that the victim dropped out, the others that it did not, and gets shares of both secrets.

    The c colluders hold shares of both. With c + lied >= t shares of the key and h - lied >= t shares of the seed the server
    reads the vector, so passive sessions protect only against an honest server. Where 2 t > h + c, as active sessions require,
    it cannot get both.
    """
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
