"""The measurements of `flower_overhead.py` for rounds over Flower's processes: seconds, bytes, and the parts of the seconds."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from secure_fed.flower.supernode import LOG
from tests.flower_loopback import Loopback

NAMES = ("advertise", "share", "mask", "unmask")
PARTS = ("noticed", "started", "loading", "ours", "returned")


@dataclass
class Sampler:
    """Samples the proxy's bytes and each SuperNode's number of received messages, twenty times a second."""

    link: Loopback
    samples: list[tuple[float, int, int]] = field(default_factory=list)
    taken: list[list[float]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        logs = [folder / LOG for folder in self.link.homes]
        before = [log.read_bytes().count(b"Receiving:") for log in logs]
        self.taken = [[] for _ in logs]
        wire = self.link.recording
        assert wire is not None
        while not self.over.wait(0.05):
            self.samples.append((time.time(), sum(map(len, list(wire.up))), sum(map(len, list(wire.down)))))
            for log, known, taken in zip(logs, before, self.taken, strict=True):
                new = log.read_bytes().count(b"Receiving:") - known - len(taken)
                taken += [time.time()] * new

    def between(self, began: float, ended: float) -> tuple[int, int]:
        """Bytes up and down."""
        before = [sample for sample in self.samples if sample[0] <= began][-1]
        after = next(sample for sample in self.samples if sample[0] >= ended)
        return after[1] - before[1], after[2] - before[2]


@contextmanager
def sampled(link: Loopback) -> Iterator[Sampler]:
    sampler = Sampler(link)
    thread = threading.Thread(target=sampler.watch)
    thread.start()
    try:
        yield sampler
        time.sleep(0.2)
    finally:
        sampler.over.set()
        thread.join()


@dataclass
class Measured:
    """Figures of the rounds after the first: seconds; by stage, seconds and bytes per node; and the last node's parts."""

    round: float
    stages: dict[str, float]
    up: dict[str, float]
    down: dict[str, float]
    parts: dict[str, float]
    simulated: float = float("nan")
    trains: int = 0

    @classmethod
    def of(
        cls, rounds: list[float], stages: list[dict[str, Any]], sampler: Sampler, messages: list[list[Any]]
    ) -> Measured:
        later = [one for one in stages if one["round"] and one["name"] in NAMES]
        nodes = len(messages)
        wire = [(one["name"], sampler.between(one["began"], one["ended"])) for one in later]
        each = [found for one in later if (found := parts(one, messages, sampler))]
        return cls(
            statistics.median(rounds),
            {
                name: statistics.median(one["ended"] - one["began"] for one in later if one["name"] == name)
                for name in NAMES
            },
            {name: statistics.median(up / nodes for own, (up, _) in wire if own == name) for name in NAMES},
            {name: statistics.median(down / nodes for own, (_, down) in wire if own == name) for name in NAMES},
            {part: statistics.mean(one[part] for one in each) for part in (*PARTS, "cpu")},
        )


def parts(stage: dict[str, Any], messages: list[list[Any]], sampler: Sampler) -> dict[str, float]:
    """Seconds of the parts of a stage for the last node, by its answer's arrival or else by its agent's answer."""
    last: dict[str, float] = {}
    for node, (own, taken) in enumerate(zip(messages, sampler.taken, strict=True)):
        assert len(own) == len(taken), f"node {node} took {len(taken)} messages and answered {len(own)}"
        for message, when in zip(own, taken, strict=True):
            if stage["began"] <= message["asked"] <= stage["ended"]:
                there = stage["answers"].get(str(message["node"]), stage["ended"])
                ticks = [stage["began"], when, message["began"], message["asked"], message["answered"], there]
                if (
                    not last
                    or there > last["there"]
                    or (there == last["there"] and message["answered"] > last["answered"])
                ):
                    spent = [after - before for before, after in pairwise(ticks)]
                    last = dict(zip(PARTS, spent, strict=True)) | message | {"there": there}
    return last
