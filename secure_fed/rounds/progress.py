"""The progress of a run within a round, for displays: the stage, the number of finished clients, the bytes so far.

Observation changes nothing: `Told` passes on every request and every answer unchanged. Where the guarantee requires that nobody
learns the cohort size, no number is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from secure_fed.rounds.transport import Reply, Request, Stage, Transport

TRAINING, TESTING = "training", "testing"
PROBING = "measuring what the noise alone does"
_STAGES = {
    "advertise": "exchanging keys",
    "share": "sharing secrets",
    "mask": TRAINING,
    "consistency": "comparing lists",
    "unmask": "taking masks off",
}


@dataclass(frozen=True)
class Progress:
    """round: from 0. done: the number of finished clients out of `total`, possibly fractional; total 0: not reported. sent:
    bytes of the round so far, in both directions.
    """

    round: int
    stage: str
    done: float = 0.0
    total: int = 0
    sent: int = 0

    def __str__(self) -> str:
        """The stage, and the number of finished clients, if it is reported."""
        return self.stage + (f" {int(self.done)}/{self.total}" if self.total else "")

    @property
    def share(self) -> float:
        """The finished share of the round. Training takes nearly all of it."""
        if self.stage == TRAINING:
            return self.done / self.total if self.total else 0.0
        return float(self.stage in (TESTING, *_AFTER))


_AFTER = (_STAGES["consistency"], _STAGES["unmask"])


@dataclass
class Told:
    """A transport that reports its exchanges. counted: whether it reports numbers."""

    inner: Transport
    tell: Callable[[Progress], None]
    counted: bool = True
    _now: Progress = Progress(-1, "")
    _answered: int = 0

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        asked = next(iter(requests.values()), None)
        if asked is not None:
            alike = isinstance(asked, Request)
            sent = asked.bytes_down * len(requests) if alike else sum(one.bytes_down for one in requests.values())
            self._begin(asked, len(requests), sent)
        for reply in self.inner.exchange(requests):
            self._answered += 1
            sent = reply.contribution.wire_size if isinstance(reply, Reply) else len(reply.message)
            self._say(max(self._now.done, self._answered), sent)
            yield reply

    def ahead(self, trained: float) -> None:
        """`trained` clients beyond the clients that have answered are trained, in common passes."""
        if self._now.stage == TRAINING:
            self._say(self._answered + trained)

    def testing(self, round_: int) -> None:
        """The round's sums are complete, and its state is being evaluated."""
        sent = self._now.sent if self.counted and self._now.round == round_ else 0
        self.tell(Progress(round_, TESTING, sent=sent))

    def _begin(self, asked: Any, total: int, sent: int) -> None:
        before = self._now.sent if asked.round == self._now.round else 0
        name = _STAGES.get(asked.name, asked.name) if isinstance(asked, Stage) else TRAINING
        self._answered = 0
        self._now = Progress(asked.round, name, 0.0, total, before)
        self._say(0.0, sent)

    def _say(self, done: float, sent: int = 0) -> None:
        now = self._now
        self._now = Progress(now.round, now.stage, done, now.total, now.sent + sent)
        self.tell(self._now if self.counted else Progress(now.round, now.stage))
