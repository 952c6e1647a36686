"""Progress of a run: a line on standard error, and TensorBoard events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from secure_fed.errors import ConfigError
from secure_fed.learning.tasks.headline import spoken
from secure_fed.methods.method import State
from secure_fed.report.formatting import size
from secure_fed.report.terminal import PlainConsole
from secure_fed.rounds.record import Record


class ConsoleProgress:
    """A progress bar with rounds, accuracy, bytes so far and time left; without a terminal, a plain line per round.

    A resumed run starts after the rounds that are `done`. A display that fails stops no run.
    """

    def __init__(self, rounds: int, done: Sequence[Record] = ()) -> None:
        self._console = PlainConsole(stderr=True)
        self._progress = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[news]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            expand=True,
        )
        self._bytes = 0
        self._measured: list[str] = []
        for record in done:
            self._count(record)
        self._task = self._progress.add_task("rounds", total=rounds, completed=len(done), news="")
        self._rounds = rounds

    def __enter__(self) -> ConsoleProgress:
        with suppress(Exception):
            if self._console.is_terminal:
                self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Exception):
            if self._console.is_terminal:
                self._progress.stop()

    def on_round_end(self, record: Record, state: State) -> None:
        with suppress(Exception):
            self._show(record, state.round)

    def _show(self, record: Record, finished: int) -> None:
        self._count(record)
        news = f"{''.join(f'{shown}, ' for shown in self._measured)}{size(self._bytes)} sent"
        self._progress.update(self._task, completed=finished, news=news)
        why = _REFUSED if "masked" in record else _NOT_FINITE
        for name in record["rejected"]:
            self._console.print(f"round {finished}: left out client {name}: {why}", soft_wrap=True)
        if record.get("lost"):
            self._console.print(f"round {finished} is lost: {record['lost']}", soft_wrap=True)
        for name, how in record.get("caught", {}).items():
            self._console.print(f"round {finished}: client {name} {how}", soft_wrap=True)
        if not self._console.is_terminal:
            left = self._progress.tasks[0].time_remaining
            clock = f", {left:.0f} s left" if left else ""
            self._console.print(f"round {finished}/{self._rounds}: {news}{clock}", soft_wrap=True)

    def _count(self, record: Record) -> None:
        self._bytes += record.get("bytes_up", 0) + record.get("bytes_down", 0)
        found = [f"accuracy {record['accuracy']:.1%}"] if isinstance(record.get("accuracy"), float) else []
        found += [f"{spoken(name)} {record[name]:.3g}" for name in _BESIDE if isinstance(record.get(name), float)]
        self._measured = found or self._measured  # a round that was not evaluated leaves the news as they are


_NOT_FINITE = "its update is not finite"
_REFUSED = (
    "its message violates the secure aggregation protocol"  # behind masks the client itself zeroes a non-finite update
)

# Metrics of tasks for which accuracy is not enough.
_BESIDE = ("f1", "perplexity", "rmse")


class TensorBoard:
    """Every number of a round's record as a scalar under its own name; a resumed run overwrites later rounds.

    The folder appears with the first round. It lies in the private part of the run directory, since every event has its time.
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
