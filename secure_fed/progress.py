"""What a run tells while it works: a line on standard error, and TensorBoard events."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from secure_fed.engine import Record
from secure_fed.errors import ConfigError
from secure_fed.methods.method import State


def readable_bytes(count: float) -> str:
    """2_500_000 -> '2.5 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


class ConsoleProgress:
    """A bar with rounds, accuracy, bytes so far and time left; a plain line a round where there is no terminal."""

    def __init__(self, rounds: int) -> None:
        self._console = Console(file=sys.stderr)
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[news]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("rounds", total=rounds, news="")
        self._rounds = rounds
        self._bytes = 0
        self._accuracy: float | None = None

    def __enter__(self) -> ConsoleProgress:
        if self._console.is_terminal:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._progress.stop()

    def on_round_end(self, record: Record, state: State) -> None:
        self._bytes += record["bytes_up"] + record["bytes_down"]
        self._accuracy = record.get("accuracy", self._accuracy)
        accuracy = "" if self._accuracy is None else f"accuracy {self._accuracy:.1%}, "
        news = f"{accuracy}{readable_bytes(self._bytes)} sent"
        self._progress.update(self._task, completed=state.round, news=news)
        for name in record["rejected"]:
            self._console.print(f"round {state.round}: left out {name}, whose update is not finite", highlight=False)
        if not self._console.is_terminal:
            left = self._progress.tasks[0].time_remaining
            clock = f", {left:.0f} s left" if left else ""
            self._console.print(f"round {state.round}/{self._rounds}: {news}{clock}", highlight=False)


class TensorBoard:
    """Every number of a round's record as a scalar under its own name; resuming writes over later rounds.

    The folder appears with the first round: it lies in the run directory, which must be unused when the run begins.
    """

    def __init__(self, folder: Path, finished: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "evaluation.tensorboard is true, but TensorBoard is not installed; pip install 'secure-fed[tensorboard]'"
            ) from error
        self._open: Callable[[], Any] = partial(SummaryWriter, str(folder), purge_step=finished + 1)
        self._writer: Any = None

    def on_round_end(self, record: Record, state: State) -> None:
        self._writer = self._writer or self._open()
        for name, value in record.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, state.round)
        self._writer.flush()

    def on_end(self, result: object) -> None:
        if self._writer is not None:
            self._writer.close()
