"""The secret key of a run's correlated noise, from its first round to its last.

    private/noise.key    32 bytes of the operating system; on disk before the first charge, removed when the run has ended

Noise made of a new key would not take back what earlier rounds released, and noise of one key over two sums of one round would
give away their difference. So a run that has charged goes on with its key or not at all, and an interrupted round of a public
order is never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from privacy.entropy import Entropy, KeyedEntropy
from secure_fed.errors import RunDirectoryError, plainly
from secure_fed.rounds.protection import Protection
from secure_fed.runs.directory import PRIVATE, made_private, private_part
from secure_fed.runs.durable import atomic_write, crash_point

NOISE_KEY = "noise.key"


@contextmanager
def opened_noise(protection: Protection, run_dir: Path | None, *, begun: bool, left: bool) -> Iterator[None]:
    """Give correlated noise its source while the run goes on. begun: it has charged a release. left: it has rounds to come."""
    noise = protection.correlated
    if noise is None or not left:
        yield
        return
    noise.source = _source(protection.entropy, run_dir, begun=begun)
    try:
        yield
    finally:
        noise.source = None


def erase(run_dir: Path) -> None:
    """Remove the key of a run that has ended, if it had one. What a disk keeps of removed files is out of reach."""
    path = private_part(run_dir) / NOISE_KEY
    if not path.exists():
        return
    with plainly(
        RunDirectoryError, f"{path} cannot be removed", "remove it, since whoever has it can take the noise away"
    ):
        path.unlink()
    crash_point(f"{NOISE_KEY}:erased")


def _source(entropy: Entropy, run_dir: Path | None, *, begun: bool) -> Entropy:
    if not entropy.private:
        return entropy  # of a seed, and so the same whenever it is asked
    if run_dir is None:
        return KeyedEntropy.new()
    path = made_private(run_dir) / NOISE_KEY
    if path.exists():
        with plainly(RunDirectoryError, f"{path} cannot be read", "make it readable"):
            return KeyedEntropy(path.read_bytes())
    if begun:
        raise RunDirectoryError(
            f"{run_dir} has released, but {PRIVATE}/{NOISE_KEY}, which its noise goes on with, is missing: restore it, or "
            "start again in another --out"
        )
    fresh = KeyedEntropy.new()
    atomic_write(path, fresh.key, private=True)
    return fresh
