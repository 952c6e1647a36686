"""The secret keys of a run's correlated noise, from its first round to its last.

    private/noise.key    for each start of the run: the first round of its noise, as a little-endian integer of 4 bytes, and 32
                         bytes of the operating system; then 8 bytes of the SHA-256 of all that; on disk before the first
                         charge, removed when the run has ended

A resumed run makes past noise again from its original keys: noise from a new key would not cancel the noise of earlier rounds.
New rounds get a new key at every start, because noise from one key on two sums of one round would reveal their difference. A
run directory that was restored from an older copy makes such a second sum: its ledger is then as old as its rounds, and cannot
detect this. With a new key the second sum has its own noise.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from privacy.entropy import Entropy, KeyedEntropy, Stream
from secure_fed.errors import RunDirectoryError, plainly
from secure_fed.rounds.protection import Protection
from secure_fed.runs.directory import PRIVATE, made_private, private_part
from secure_fed.runs.durable import atomic_write, crash_point

NOISE_KEY = "noise.key"
_ENTRY = struct.Struct("<I32s")
_CHECK = 8  # bytes


@dataclass(frozen=True)
class NoiseKeys:
    """`Entropy` whose streams of a round come from the key that was the newest when the round was begun.

    starts: (first round, key) of every start of the run, beginning with round 0; first rounds never decrease.
    """

    starts: tuple[tuple[int, KeyedEntropy], ...] = field(repr=False)

    @property
    def private(self) -> bool:
        return True

    def stream(self, *label: str | int) -> Stream:
        """The stream of a label whose second part is the round, as `("sum", round, pass)`."""
        round_ = int(label[1])
        return self.starts[bisect_right([first for first, _ in self.starts], round_) - 1][1].stream(*label)

    def begun(self, round_: int) -> NoiseKeys:
        """These keys, with a new key for this round and all later ones."""
        return NoiseKeys((*self.starts, (round_, KeyedEntropy.new())))

    def to_bytes(self) -> bytes:
        entries = b"".join(_ENTRY.pack(first, one.key) for first, one in self.starts)
        return entries + hashlib.sha256(entries).digest()[:_CHECK]

    @classmethod
    def from_bytes(cls, content: bytes) -> NoiseKeys:
        """The inverse of `to_bytes`; ValueError for other content."""
        whole = len(content) - len(content) % _ENTRY.size
        entries, check = content[:whole], content[whole:]
        right = not check or check == hashlib.sha256(entries).digest()[:_CHECK]  # earlier versions wrote no check
        if not entries or not right:
            raise ValueError("it is damaged")
        starts = tuple((first, KeyedEntropy(key)) for first, key in _ENTRY.iter_unpack(entries))
        rounds = [first for first, _ in starts]
        if rounds[0] != 0 or rounds != sorted(rounds):
            raise ValueError("it is damaged")
        return cls(starts)


@contextmanager
def opened_noise(
    protection: Protection, run_dir: Path | None, following: int, covers: Callable[[int], bool]
) -> Iterator[None]:
    """Open the source of correlated noise during the run, if its plan covers the round that follows.

    following: the next round that may be begun; no noise of it or of a later round was released. The number of charged rounds
    is smaller where a round was lost before its charge: a key from there on would make past noise again as other noise.
    """
    noise = protection.correlated
    if noise is None or not covers(following):
        yield
        return
    noise.open(_source(protection.entropy, run_dir, following))
    try:
        yield
    finally:
        noise.close()


def erase(run_dir: Path) -> None:
    """Remove the keys of a run that has ended. Remains of removed files on the disk are not erased."""
    path = private_part(run_dir) / NOISE_KEY
    with plainly(
        RunDirectoryError,
        f"{path} cannot be removed",
        "remove it, since whoever has it can subtract the noise from the models",
    ):
        path.unlink(missing_ok=True)
    crash_point("noise.key:erased")


def _source(entropy: Entropy, run_dir: Path | None, begun: int) -> Entropy:
    if not entropy.private:
        return entropy  # from a seed, so reproducible without keys
    if run_dir is None:
        return NoiseKeys(()).begun(0)
    path = made_private(run_dir) / NOISE_KEY
    keys = (_read(run_dir, path) if begun else NoiseKeys(())).begun(begun)
    atomic_write(path, keys.to_bytes(), private=True)
    return keys


def _read(run_dir: Path, path: Path) -> NoiseKeys:
    """The keys of a run that has begun rounds."""
    remedy = "restore it, or run again into another folder"
    if not path.exists():
        raise RunDirectoryError(
            f"{run_dir} has begun, but {PRIVATE}/{NOISE_KEY}, from which its later noise is computed, is missing: {remedy}"
        )
    with plainly(RunDirectoryError, f"{path}, from which the run's later noise is computed, cannot be used", remedy):
        return NoiseKeys.from_bytes(path.read_bytes())
