"""What a process is doing now, and a line on the terminal that says so.

    with heartbeat():                                  # once, around a command or a script
        ...
        with activity("loading the model") as now:     # where the work is
            ...
        with activity("checking examples", 7) as now:
            for part in parts:
                now.step()                             # "checking examples: 3 of 7"

`heartbeat` writes to standard error if that is a terminal, and only when nothing else has been written for two seconds: one
line that stays in place, with the current activity and how long it has taken. Whatever is written next replaces it. Elsewhere
it writes nothing.

Displays (`shown_by`) and activities belong to a context (`contextvars`): another thread and a test have none unless they begin
their own. A display that fails stops no work.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from threading import Event, RLock, Thread
from typing import Any, TextIO

QUIET = 2.0  # seconds without output before the line appears
_TICK = 0.5  # seconds between two looks at the time
_STOOD_STILL = 2.0  # seconds from one look to the next after which the process was not running


class Activity:
    """One activity, with the part that is under way. Changes are shown at once."""

    def __init__(self, what: str, total: int = 0, *, hushed: bool = False) -> None:
        self.what, self.total, self.part, self.began, self.hushed = what, total, 0, time.monotonic(), hushed

    def step(self) -> None:
        """The next of the `total` parts begins."""
        self.part += 1
        _show()

    def says(self, what: str, *, anew: bool = True) -> None:
        """The activity is now `what`. anew: its time starts anew."""
        self.what, self.part = what, 0
        if anew:
            self.began = time.monotonic()
        _show()

    def __str__(self) -> str:
        return f"{self.what}: {self.part} of {self.total}" if self.total and self.part else self.what


Display = Callable[[str | None, float], None]
"""Shows the current activity in words, "" for none, and when it began, in seconds of `time.monotonic`. None: show nothing."""

_displays: ContextVar[tuple[Display, ...]] = ContextVar("displays", default=())
_current: ContextVar[tuple[Activity, ...]] = ContextVar("activities", default=())  # from the outermost inwards


@contextmanager
def activity(what: str, total: int = 0, *, hushed: bool = False) -> Iterator[Activity]:
    """The activity of the block, for displays. total: the number of its parts, if it is known. hushed: displays leave the
    terminal alone, because a person is typing there.
    """
    now = Activity(what, total, hushed=hushed)
    outer = _current.set((*_current.get(), now))
    _show()
    try:
        yield now
    finally:
        _current.reset(outer)
        _show()


@contextmanager
def shown_by(display: Display) -> Iterator[None]:
    """Tell this display of every activity in the block."""
    outer = _displays.set((*_displays.get(), display))
    try:
        yield
    finally:
        _displays.reset(outer)


def _show() -> None:
    """Tell all displays of the innermost activity, behind the one around it."""
    if displays := _displays.get():
        inner = [one for one in _current.get() if str(one)][-2:]
        hushed = any(one.hushed for one in _current.get())
        for display in displays:
            with suppress(Exception):
                display(None if hushed else ", ".join(map(str, inner)), inner[-1].began if inner else time.monotonic())


@contextmanager
def heartbeat(quiet: float | None = None) -> Iterator[None]:
    """Keep a terminal informed during the block. quiet: the seconds without output before the line appears.

    Inside another heartbeat, and where standard error is no terminal, it does nothing.
    """
    if isinstance(sys.stderr, _Watched) or not _is_terminal(sys.stderr):
        yield
        return
    line = _Line(sys.stderr, QUIET if quiet is None else quiet)
    before = sys.stdout, sys.stderr
    sys.stderr = _Watched(sys.stderr, line)
    if _is_terminal(sys.stdout):
        sys.stdout = _Watched(sys.stdout, line)
    line.start()
    try:
        with shown_by(line.now):
            yield
    finally:
        line.stop()
        sys.stdout, sys.stderr = before


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # a closed stream
        return False


class _Line:
    """The line in place at the end of a terminal's output."""

    def __init__(self, terminal: TextIO, quiet: float) -> None:
        self._terminal, self._quiet, self._process = terminal, quiet, os.getpid()
        self._lock, self._end = RLock(), Event()
        self._thread = Thread(target=self._beat, name="secure-fed-heartbeat", daemon=True)
        self._what: str | None = "starting"
        self._began = time.monotonic()
        self._written, self._whole = time.monotonic(), True  # the last output, and whether it ended a line
        self._shown = 0  # the length of the line on the terminal

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        with self._lock:
            self._erase()

    def now(self, what: str | None, began: float) -> None:
        self._what, self._began = what, began
        if what is None:
            with self._lock:
                self._erase()

    def write(self, stream: TextIO, text: str) -> int:
        """Write other output in place of the line."""
        if os.getpid() != self._process:  # a forked process has no thread, and perhaps a lock that nobody releases
            return stream.write(text)
        with self._lock:
            self._erase()
            count = stream.write(text)
            if text:
                self._written, self._whole = time.monotonic(), text.endswith("\n")
            return count

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._end.wait(min(_TICK, self._quiet)):
            late, last = time.monotonic() - last, time.monotonic()
            if late > _STOOD_STILL:  # other displays stood still, too: let them go first
                continue
            with self._lock, suppress(Exception):
                if self._what is not None and (self._shown or last - self._written >= self._quiet):
                    self._draw(last)

    def _draw(self, at: float) -> None:
        width = max(20, _width(self._terminal)) - 1
        text = f"secure-fed: {self._what or 'working'}, {_duration(at - self._began)}"
        if len(text) > width:
            tail = f" ..., {_duration(at - self._began)}"
            text = text[: width - len(tail)] + tail
        if not self._whole:
            self._terminal.write("\n")
            self._whole = True
        self._terminal.write("\r" + text.ljust(self._shown))
        self._terminal.flush()
        self._shown = len(text)

    def _erase(self) -> None:
        """Remove the line; with spaces, which every terminal understands."""
        if self._shown:
            with suppress(Exception):
                self._terminal.write("\r" + " " * self._shown + "\r")
                self._terminal.flush()
            self._shown = 0


class _Watched:
    """A terminal's stream; the line makes room for whatever is written to it."""

    def __init__(self, stream: TextIO, line: _Line) -> None:
        self._stream, self._line = stream, line

    def write(self, text: str) -> int:
        return self._line.write(self._stream, text)

    def writelines(self, lines: Any) -> None:
        for one in lines:
            self.write(one)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _width(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
