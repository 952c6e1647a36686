"""The streams of noise and secret coins: their bytes, their labels and their laws, and that nothing else determines them.

Streams are seeded, so no test fails by chance. A seeded stream differs from a private one by its key alone.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from scipy import stats

from privacy import entropy
from privacy.entropy import ForkError, KeyedEntropy, SeededEntropy, Stream, SystemEntropy
from tests.cells import chosen, every

KEY = bytes(range(32))


def keystream(key: bytes, count: int) -> bytes:
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(count))


def naive_uniform(words: bytes) -> list[float]:
    """The first 53 bits of each little-endian word of eight bytes, as a fraction: exact in Python's integers."""
    at = range(0, len(words), 8)
    return [(int.from_bytes(words[start : start + 8], "little") >> 11) / 2**53 for start in at]


def naive_normal(key: bytes, count: int) -> list[float]:
    """Box and Muller's transform, one pair at a time; `count` may not exceed one batch of `Stream.normal`."""
    pairs = (count + 1) // 2
    u = naive_uniform(keystream(key, 16 * pairs))
    radii = [math.sqrt(-2 * math.log(1 - one)) for one in u[:pairs]]
    angles = [2 * math.pi * one for one in u[pairs:]]
    cosines = [radius * math.cos(angle) for radius, angle in zip(radii, angles, strict=True)]
    sines = [radius * math.sin(angle) for radius, angle in zip(radii, angles, strict=True)]
    return (cosines + sines)[:count]


def stream(*label: str | int) -> Stream:
    return SeededEntropy(0).stream(*label)


def test_chacha20_is_that_of_rfc_8439() -> None:
    """The first keystream block of appendix A.1: key, counter and nonce are zeros."""
    assert keystream(bytes(32), 16).hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_uniforms_are_the_keystream_and_nothing_else() -> None:
    assert Stream(KEY).uniform(1000).tolist() == naive_uniform(keystream(KEY, 8000))


@every("count", [1, 2, 3, 10, 777])
def test_normals_are_box_and_muller_over_the_keystream(count: int) -> None:
    found = Stream(KEY).normal((count,))
    assert found == pytest.approx(naive_normal(KEY, count), rel=1e-12, abs=1e-12)


def test_successive_calls_continue_the_stream() -> None:
    drawn = Stream(KEY)
    parts = [drawn.uniform(count) for count in (1, 0, 7, 64, 500)]
    assert np.concatenate(parts).tolist() == Stream(KEY).uniform(572).tolist()
    mixed = Stream(KEY)
    assert mixed.normal((3,)).shape == (3,)  # two pairs: four words of the keystream
    assert mixed.uniform(5).tolist() == Stream(KEY).uniform(9)[4:].tolist()


def test_a_stream_goes_on_with_another_nonce_where_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cryptography` gives 2^38 bytes for a nonce: a long private training ended there."""
    monkeypatch.setattr("privacy.entropy._OF_A_NONCE", 64)
    parts = Stream(KEY)
    drawn = np.concatenate([parts.words(count) for count in (3, 10, 0, 16, 3)])
    assert drawn.tolist() == Stream(KEY).words(32).tolist()
    assert drawn[:8].tobytes() == keystream(KEY, 64)
    assert len(set(drawn.tolist())) == 32, "no nonce comes twice"


def test_a_stream_takes_256_bits_of_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return KEY

    monkeypatch.setattr(os, "urandom", urandom)
    assert SystemEntropy().stream("a", 1).uniform(9).tolist() == Stream(KEY).uniform(9).tolist()
    assert asked == [32]


def test_a_stream_cannot_be_kept_or_doubled() -> None:
    """A copy of a stream would draw the same noise again, and noise that is used twice hides nothing."""
    with pytest.raises(TypeError):
        pickle.dumps(SystemEntropy().stream("a"))
    with pytest.raises(TypeError):
        copy.deepcopy(SystemEntropy().stream("a"))


def in_a_fork(draw: Callable[[], object]) -> str:
    """What a forked process answers that draws."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = repr(draw())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode())
        os._exit(0)
    os.waitpid(child, 0)
    answer = os.read(read, 10_000).decode()
    os.close(read)
    os.close(write)
    return answer


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_fork_cannot_use_a_secret_stream_and_can_make_its_own() -> None:
    """Two processes with one keystream would hide two sums by the same noise."""
    secret, seeded = SystemEntropy().stream("steps"), stream("steps")
    assert in_a_fork(lambda: secret.uniform(1)).startswith("ForkError: process ")
    assert in_a_fork(lambda: secret.normal((3,))).startswith("ForkError: process ")
    assert in_a_fork(lambda: SystemEntropy().stream("steps").words(1)) != repr(secret.words(1))
    assert in_a_fork(lambda: KeyedEntropy(KEY).stream("a").words(1)) == repr(KeyedEntropy(KEY).stream("a").words(1))
    assert in_a_fork(lambda: seeded.words(1)) == repr(stream("steps").words(1))


def test_a_secret_stream_asks_for_the_process_at_every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    secret, process = SystemEntropy().stream("a"), os.getpid()
    secret.words(1)
    monkeypatch.setattr(os, "getpid", lambda: process + 1)
    with pytest.raises(ForkError, match=f"process {process + 1} uses secret random numbers of process {process},"):
        secret.words(1)


QUOTED = ["a", "ab", "a,b", 'a", "b', 'a","b', "['a']", "null"]
ODD = ["", *QUOTED, "\\", "\\\\", "\n", "\\n", "é", "\\u00e9", "e\u0301", "\0", "\0\0"]
PARTS = [("", ""), ("a", "b"), ("b", "a"), ("a", "b", ""), (1, 2), ("sum", 1, "0"), ("sum", 1, 0), ("sum", 10)]
LABELS: list[tuple[str | int, ...]] = [(), *((one,) for one in (*ODD, 1, "1", 12, "1, 2", -1, 0, "0")), *PARTS]


class Joined(SeededEntropy):
    """A broken entropy: it joins the parts of a label, so that different labels give the same key."""

    def stream(self, *label: str | int) -> Stream:
        return Stream(hashlib.sha256(",".join(map(str, [self.seed, *label])).encode()).digest())


def collisions(kind: type[SeededEntropy]) -> int:
    """The number of streams, of four seeds and all labels, whose first number is another stream's too."""
    firsts = [float(kind(seed).stream(*label).uniform(1)[0]) for seed in (0, 1, 10, -1) for label in LABELS]
    return len(firsts) - len(set(firsts))


def test_neither_a_stream_nor_the_global_generators_decide_the_other() -> None:
    """Global seeds have no part in private noise, and drawing it must not change what an experiment's seed determines."""
    secret, left = [], []
    for _ in range(2):
        seed_everything()
        secret += SystemEntropy().stream("noise").normal((1000,)).tolist()
        assert stream("a").normal((4,)).tolist() == stream("a").normal((2, 2)).ravel().tolist()
        left.append((random.random(), np.random.random(), float(torch.rand(()))))
    assert len(set(secret)) == len(secret), "every stream has a key of its own"
    seed_everything()
    assert left == 2 * [(random.random(), np.random.random(), float(torch.rand(())))]


def test_seeded_streams_differ_by_seed_and_by_label() -> None:
    """No two labels share a stream, however a label is divided into parts and whatever characters these contain."""
    assert collisions(SeededEntropy) == 0
    assert collisions(Joined) > 0


def test_only_the_operating_systems_entropy_is_private_whatever_anybody_declares() -> None:
    assert (SystemEntropy().private, SeededEntropy(0).private) == (True, False)
    for kind, given in ((SeededEntropy, (0,)), (SystemEntropy, ())):
        with pytest.raises(TypeError):
            kind(*given, private=True)  # type: ignore[call-arg]
    with pytest.raises(AttributeError):
        SeededEntropy(0).private = True  # type: ignore[misc]


def seed_everything() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


BORDER = entropy._AT_ONCE
TOO_UNLIKELY = 1e-4  # a p-value below which a law is rejected


class FixedBits(Stream):
    """A stream whose uniforms are given."""

    def __init__(self, *uniforms: float) -> None:
        self._left = list(uniforms)

    def uniform(self, count: int) -> NDArray[np.float64]:
        taken, self._left = self._left[:count], self._left[count:]
        return np.array(taken)


def test_tails_are_as_heavy_as_they_should_be() -> None:
    """Noise with thin tails would hide nothing there: the counts beyond 2, 3, 4 and 4.5 sigma must be binomial."""
    count = 1_000_000
    drawn = stream("tails").normal((count,))
    for sigma in (2, 3, 4, 4.5):
        for beyond in (int((drawn > sigma).sum()), int((drawn < -sigma).sum())):
            assert stats.binomtest(beyond, count, stats.norm.sf(sigma)).pvalue > TOO_UNLIKELY
    assert stats.kstest(drawn[:100_000], "norm").pvalue > TOO_UNLIKELY
    assert stats.binomtest(0, count, stats.norm.sf(4)).pvalue < TOO_UNLIKELY  # a truncated tail is noticed


@every("angle", [0.0, 0.25, 0.5, 1 - 2.0**-53])
@every("radius", [0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
def test_the_extreme_uniforms_give_finite_normals(radius: float, angle: float) -> None:
    drawn = FixedBits(radius, angle).normal((2,))
    assert np.isfinite(drawn).all()
    assert np.abs(drawn).max() < 8.6
    assert np.hypot(*drawn) == pytest.approx(math.sqrt(-2 * math.log1p(-radius)))


@pytest.mark.parametrize(
    "count", chosen([BORDER - 1, BORDER, BORDER + 1, BORDER + 2, 2 * BORDER + 3], [BORDER + 1, 2 * BORDER + 3])
)
def test_across_the_border_between_two_batches(count: int) -> None:
    """Batches leave no trace: every part is normal, no number repeats, and the last batch is there."""
    drawn = stream("border").normal((count,))
    assert (drawn.shape, len(np.unique(drawn))) == ((count,), count)
    for part in (drawn, drawn[:BORDER], drawn[max(0, BORDER - 20_000) : BORDER + 20_000], drawn[BORDER:]):
        assert len(part) < 1000 or stats.kstest(part, "norm").pvalue > TOO_UNLIKELY
    if count >= 2 * BORDER:
        assert stats.pearsonr(drawn[:BORDER], drawn[BORDER : 2 * BORDER]).pvalue > TOO_UNLIKELY
