"""Progress of a run: a line on standard error."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from secure_fed.activity import shown_by
from secure_fed.config import RunConfig
from secure_fed.learning.tasks.headline import headline, shown
from secure_fed.methods.method import State
from secure_fed.report.formatting import at_most, size
from secure_fed.report.terminal import PlainConsole
from secure_fed.rounds.engine import Charges
from secure_fed.rounds.sums import Record
from secure_fed.rounds.transport import Progress as Within
from secure_fed.runs import guarantee

if TYPE_CHECKING:
    from privacy.plan import Plan


class ConsoleProgress:
    """One line that always moves: rounds, the stage and its clients, accuracy, epsilon and bytes so far, time left.

    Without a terminal it is a plain line after every round, and within a round one every quarter of a minute. A resumed run
    starts after the rounds that are `done`. A display that fails stops no run. task: its headline metric is shown first.
    of_answers: the metric of written answers, which is shown too.
    """

    def __init__(
        self, rounds: int, done: Sequence[Record] = (), task: str = "classification", of_answers: str = ""
    ) -> None:
        self._console = PlainConsole(stderr=True)
        self._bar = Progress(
            TextColumn("round"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[news]}", markup=False),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}", markup=False),
            console=self._console,
            expand=True,
        )
        self._rounds, self._begun, self._finished = rounds, len(done), len(done)
        self._metrics = tuple(dict.fromkeys((headline(task), "accuracy", *_BESIDE, of_answers)))
        self._plan: Plan | None = None
        self._charges: Charges | None = None
        self._epsilon = ""
        self._bytes, self._measured, self._measured_in = 0, list[str](), 0
        for record in done:
            self._count(record)
        self._started = self._warm = self._said = time.monotonic()
        self._task = self._bar.add_task("rounds", total=rounds, completed=self._finished, news="preparing", left="")

    def __enter__(self) -> ConsoleProgress:
        with suppress(Exception):
            if self._console.is_terminal:
                self._bar.start()
        self._open = ExitStack()
        self._open.enter_context(shown_by(self._doing))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        with suppress(Exception):
            if self._console.is_terminal:
                self._bar.stop()

    def begin(self, plan: Plan | None, charges: Charges | None = None) -> None:
        """From here on epsilon is shown by the plan of a private run, for the releases that are charged."""
        self._plan, self._charges = plan, charges

    def _doing(self, what: str | None, began: float) -> None:
        """Show an activity of the preparation, or of a trial within a round."""
        if what is not None:
            self._bar.update(self._task, news=what or "preparing")
            if what and not self._console.is_terminal and time.monotonic() - self._said > _SILENCE:
                self._said = time.monotonic()
                self._console.print(f"secure-fed: {what}", soft_wrap=True)

    def on_promise(self, sentences: Sequence[str]) -> None:
        with suppress(Exception):
            for sentence in sentences:
                self._console.print(f"secure-fed: {sentence}", soft_wrap=True)

    def on_run_begin(self, config: RunConfig, run_dir: Path | None) -> None:
        self._started = time.monotonic()

    def on_probe(self, figures: Mapping[str, Any]) -> None:
        with suppress(Exception):
            said = (guarantee.noise_in_words(figures), guarantee.shortened_steps(figures))
            self._console.print(f"secure-fed: {'; '.join(filter(None, said))}", soft_wrap=True)
            if why := guarantee.hopeless_noise(figures):
                self._console.print(f"secure-fed: warning: {why}", soft_wrap=True)

    def on_progress(self, progress: Within) -> None:
        with suppress(Exception):
            news, left = self._news(str(progress), progress.sent), self._left(progress.round + progress.share)
            self._bar.update(self._task, news=news, left=left)
            if not self._console.is_terminal and time.monotonic() - self._said > _SILENCE:
                self._print(progress.round + 1, news, left)

    def on_round_end(self, record: Record, state: State) -> None:
        with suppress(Exception):
            self._show(record, state.round)

    def _show(self, record: Record, finished: int) -> None:
        self._count(record)
        if finished == self._begun + 1:
            self._warm = time.monotonic()
        self._finished = finished
        if self._plan and not self._plan.limits:  # limits count each client's releases, not rounds
            made = (self._charges.made if self._charges else None) or finished * self._plan.passes
            self._epsilon = f"epsilon {at_most(self._plan.epsilon(made))}, "
        news, left = self._news(), self._left(finished)
        self._bar.update(self._task, completed=finished, news=news, left=left)
        why = _REFUSED if "masked" in record else _NOT_FINITE
        for name in record["rejected"]:
            self._console.print(f"round {finished}: left out client {name}: {why}", soft_wrap=True)
        if record.get("lost"):
            self._console.print(f"round {finished} is lost: {record['lost']}", soft_wrap=True)
        for name, how in record.get("caught", {}).items():
            self._console.print(f"round {finished}: client {name} {how}", soft_wrap=True)
        if not self._console.is_terminal:
            self._print(finished, news, left)

    def _print(self, round_: int, news: str, left: str) -> None:
        self._said = time.monotonic()
        self._console.print(f"round {round_}/{self._rounds}: {news}{', ' if left else ''}{left}", soft_wrap=True)

    def _news(self, stage: str = "", sent: int = 0) -> str:
        """The stage, the last metrics (with their round, unless it is the latest), and the bytes."""
        of = "" if self._measured_in == self._finished and not stage else f" after round {self._measured_in}"
        measured = "".join(f"{shown}{of}, " for shown in self._measured)
        return f"{stage}{', ' if stage else ''}{measured}{self._epsilon}{size(self._bytes + sent)} sent"

    def _left(self, done: float) -> str:
        """The remaining time, once half a round of this process is done.

        The first round takes up to five times as long, since layers and caches are used for the first time. Later ones are
        foreseen without it, and what it alone foresees is called so.
        """
        here = done - self._begun
        if here < 0.5 or done >= self._rounds:
            return ""
        since, rounds = (self._warm, here - 1) if here >= 1.5 else (self._started, here)
        seconds = (time.monotonic() - since) / rounds * (self._rounds - done)
        return f"{timedelta(seconds=round(seconds))} left{'' if here >= 1.5 else ' by the slow first round'}"

    def _count(self, record: Record) -> None:
        self._bytes += record.get("bytes_up", 0) + record.get("bytes_down", 0)
        found = [shown(name, record[name]) for name in self._metrics if isinstance(record.get(name), float)]
        if found:
            self._measured, self._measured_in = found, record["round"]


_SILENCE = 15.0  # seconds
_NOT_FINITE = "its update is not finite"
_REFUSED = (
    "its message violates the secure aggregation protocol"  # behind masks the client itself zeroes a non-finite update
)

# Metrics of tasks for which accuracy is not enough.
_BESIDE = ("f1", "perplexity", "rmse")
