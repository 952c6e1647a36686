"""Answers of masked clients, which this process or another makes, and the time that they cost."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.client import Message, Waiting


@dataclass
class Clock:
    """Seconds that the clients of this process have spent on the protocol, training apart."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Begun:
    """An answer, made here or in another process, or the error. seconds: the time spent here, training apart."""

    answer: Message | Waiting
    seconds: float
    error: Exception | None = None

    def result(self) -> tuple[Message, float]:
        if self.error is not None:
            raise self.error
        if not isinstance(self.answer, Waiting):
            return self.answer, self.seconds
        message, seconds = self.answer.result()
        return message, self.seconds + seconds
