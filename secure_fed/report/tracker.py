"""A tracker: it sends the public records of a run, as in `metrics.jsonl`, to a service that other people read."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.rounds.sums import Record
from secure_fed.runs.directory import made_private, private_part, read_text
from secure_fed.runs.durable import atomic_write

_log = logging.getLogger(__name__)


class Tracker(ABC):
    """Sends a service the settings of a run and its public records, round by round.

    Without privacy the service gets each round at its end. For a private run all rounds are written when the run ends, to files
    in the private part of the run directory, and nothing leaves the machine: the time of a round reveals how many clients
    trained in it, and the time of the end reveals their sum. A resumed run continues the service's earlier run. A service that
    fails after the start stops no run.
    """

    name = ""  # of the service
    advice = ""  # the remedy if it cannot be started

    def on_run_begin(self, config: RunConfig, run_dir: Path | None) -> None:
        """Start the service of a run without privacy, so that its problems are reported before any training."""
        self._config, self._run_dir = config, run_dir
        self._id, self._failed = "", False
        if config.privacy.unit == "none":
            try:
                self._begin(None)
            except Exception as error:
                raise ConfigError(f"{self.name} cannot be started: {_short(error)}; {self.advice}") from error
        elif run_dir is None:
            raise ConfigError(
                f"{self.name} receives a private run as files of its run directory: name one with run(out)"
            )

    def on_published(self, record: Record) -> None:
        """Pass a round's public record on."""
        self._try(lambda: self._pass_on(record))

    def on_end(self, result: object) -> None:
        if self._id:
            self._try(self._close)

    def _pass_on(self, record: Record) -> None:
        folder = made_private(self._run_dir) if self._run_dir else None
        if not self._id:
            self._begin(folder)
        if folder and self._noted() != self._id:
            atomic_write(folder / self._note, self._id, private=True)
        self._log(dict(numbers(record)), record["round"])

    def _begin(self, folder: Path | None) -> None:
        title = self._run_dir.absolute().name if self._run_dir else None
        self._id = self._open(title, self._noted(), folder)

    @property
    def _note(self) -> str:
        return f"{type(self).__name__}.id"

    def _noted(self) -> str | None:
        """The id of the service's run, if this run was begun before."""
        return read_text(private_part(self._run_dir) / self._note) if self._run_dir else None

    def _try(self, action: Callable[[], None]) -> None:
        if not self._failed:
            try:
                action()
            except Exception as error:
                self._failed = True
                _log.warning("%s failed, and the run goes on without it: %s", self.name, _short(error))

    @abstractmethod
    def _open(self, title: str | None, known: str | None, folder: Path | None) -> str:
        """Begin a run of the service, or resume the `known` one; returns its id. With a `folder` nothing leaves the machine."""

    @abstractmethod
    def _log(self, values: dict[str, float], step: int) -> None:
        """Numbers after a round."""

    @abstractmethod
    def _close(self) -> None:
        """End the run of the service."""


def numbers(record: Mapping[str, Any], of: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a record under its own name, numbers of an inner record after its name: "clients_accuracy/mean"."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from numbers(value, f"{of}{name}/")
        elif isinstance(value, int | float):
            yield f"{of}{name}", float(value)


def _short(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
