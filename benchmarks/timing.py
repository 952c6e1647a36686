"""Shared code of the benchmarks: alternating timings, a description of the machine, and limits beside measured figures.

Other work on a machine changes timings, so compared ways alternate within one process: each once, then each again. A ratio is
the median of the turns' ratios; a time is the median, or the least if it is compared across processes.
"""

from __future__ import annotations

import os
import platform
import re
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Timed = Callable[[], float]  # performs an action once; returns its seconds


def timed(action: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> Timed:
    """The action with timing; `time.process_time` as the clock excludes other processes."""

    def once() -> float:
        started = clock()
        action()
        return clock() - started

    return once


def turns(ways: Mapping[str, Timed], repeats: int, *, warm: int = 0) -> dict[str, list[float]]:
    """Seconds of every way in every turn, after `warm` uncounted turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(warm + repeats):
        for name, way in ways.items():
            seconds = way()
            if turn >= warm:
                found[name].append(seconds)
    return found


def medians(found: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(each) for name, each in found.items()}


def ratio(over: list[float], under: list[float]) -> float:
    """The median of the ratios of the turns."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def machine(*packages: str) -> str:
    """The processor, cores, load and versions, in one line; packages that are not installed are left out."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), cpu)
    load = f", load {os.getloadavg()[0]:.1f} at the start" if hasattr(os, "getloadavg") else ""
    versions = "".join(f", {name} {found}" for name in packages if (found := installed(name)))
    return f"{cpu}, {os.cpu_count()} cores{load}; Python {platform.python_version()}{versions}"


def installed(package: str) -> str:
    """The package's version, or nothing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def ended(processes: Iterable[subprocess.Popen[Any]], seconds: float) -> list[int | None]:
    """The exit status of each process; None for all if they take longer. Their child processes (such as Ray's actors) end too.

    Each must be started with `start_new_session=True`.
    """
    started, until = list(processes), time.monotonic() + seconds
    try:
        return [one.wait(max(0.0, until - time.monotonic())) for one in started]
    except subprocess.TimeoutExpired:
        return [None for _ in started]
    finally:
        for one in started:
            with suppress(ProcessLookupError):
                os.killpg(one.pid, signal.SIGKILL)
            one.wait()


@dataclass(frozen=True)
class Limit:
    """A measured figure, and whether it keeps its limit."""

    what: str
    found: float
    met: bool

    def __str__(self) -> str:
        return f"    {'met    ' if self.met else 'NOT MET'}  {self.found:8.3f}  {self.what}"


def at_most(what: str, found: float, limit: float) -> Limit:
    return Limit(f"{what}, at most {limit:g}", found, found <= limit)


def at_least(what: str, found: float, limit: float) -> Limit:
    return Limit(f"{what}, at least {limit:g}", found, found >= limit)


def show(limits: Iterable[Limit]) -> None:
    """Print limits in the form that `limits_of` reads."""
    print("\nLimits")
    for limit in limits:
        print(limit)


def limits_of(printed: str) -> list[Limit]:
    """The limits in a benchmark's output."""
    lines = re.findall(r"^    (met    |NOT MET) +([-\d.]+|nan|inf)  (.*)$", printed, re.MULTILINE)
    return [Limit(what, float(found), met == "met    ") for met, found, what in lines]
