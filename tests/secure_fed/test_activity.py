"""What a terminal shows while a command works: the activity and its count, only in silence, and never in the way."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress

import pytest

from secure_fed.activity import activity, heartbeat, shown_by

SOON = 0.02  # seconds of quiet


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@contextmanager
def terminal() -> Iterator[Terminal]:
    """Standard error and standard output, on one terminal."""
    made = Terminal()
    with redirect_stderr(made), redirect_stdout(made):
        yield made


@contextmanager
def beating() -> Iterator[Terminal]:
    with terminal() as made, heartbeat(SOON):
        yield made


def until(true: Callable[[], bool]) -> None:
    """Wait for the other thread, for as long as a loaded machine may need."""
    for _ in range(2000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come")


def on_screen(written: str) -> list[str]:
    """The lines that a person sees in the end."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for part in line.split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines


def test_in_silence_the_activities_and_their_count_are_shown() -> None:
    with beating() as screen:
        with activity("round 2 of 9"), activity("training"), activity("trying", 4) as now:
            now.step()
            until(lambda: "secure-fed: training, trying: 1 of 4, 0 s" in screen.getvalue())
        until(lambda: "secure-fed: working, " in screen.getvalue())


def test_whatever_is_written_takes_the_place_of_the_line() -> None:
    with beating() as screen, activity("counting sheep"):
        until(lambda: "sheep" in screen.getvalue())
        print("a note", file=sys.stderr)
        print("a result")
        until(lambda: screen.getvalue().rpartition("result")[2].count("sheep") > 0)
    assert on_screen(screen.getvalue()) == ["a note", "a result", ""]


def test_a_line_that_was_begun_is_not_written_over() -> None:
    with beating() as screen:
        print("half a", end="")
        until(lambda: "starting" in screen.getvalue())
    assert on_screen(screen.getvalue()) == ["half a", ""]


def test_nothing_is_written_where_a_person_types() -> None:
    with beating() as screen:
        until(lambda: "starting" in screen.getvalue())
        with activity("", hushed=True):
            before = screen.getvalue()
            time.sleep(10 * SOON)
            assert screen.getvalue() == before
    assert on_screen(before) == [""]


def test_elsewhere_than_on_a_terminal_nothing_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    stream = sys.stderr
    with heartbeat(SOON), activity("counting sheep"):
        assert sys.stderr is stream
        time.sleep(10 * SOON)
    assert capsys.readouterr() == ("", "")


def test_a_heartbeat_in_a_heartbeat_adds_no_second_line_and_gives_the_terminal_back() -> None:
    with terminal() as screen:
        with suppress(KeyError), heartbeat(SOON):
            outer = sys.stderr
            assert outer is not screen
            with heartbeat(SOON):
                assert sys.stderr is outer
            assert sys.stderr is outer
            raise KeyError
        assert (sys.stdout, sys.stderr) == (screen, screen)


def test_a_display_hears_of_its_own_context_alone() -> None:
    heard: list[str | None] = []
    with shown_by(lambda what, began: heard.append(what)):
        other = threading.Thread(target=lambda: activity("elsewhere").__enter__())
        other.start()
        other.join()
        with activity("here"):
            pass
    with activity("afterwards"):
        pass
    assert heard == ["here", ""]


def test_a_display_that_fails_stops_no_work() -> None:
    def failing(what: str | None, began: float) -> None:
        raise RuntimeError("no terminal")

    with shown_by(failing), activity("counting sheep", 2) as now:
        now.step()
        assert now.part == 1
