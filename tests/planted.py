"""Planted faults: mistakes put into a copy of the tree, one after the other, for quick tests to catch.

    python tests/planted.py [NAMES...]

A fault of `planted.toml` is one mistake that would void a guarantee or a figure: the text of the program that it replaces, and
the tests that have to fail once it is there. The same tests have to pass without it. A fault is **caught** if they fail and
**missed** if they pass. A text that is not in its file exactly once, or tests that pytest cannot run, make it an **error**.
Exit status: 0 if every fault was caught, else 1.

First all selections of tests run together, without a fault. Then each runs in a process of its own, one at a time, with its
fault. A process is forked from one that has loaded the libraries and nothing of the project; where a system cannot fork, it
starts from nothing, which takes some seconds more.
"""

from __future__ import annotations

import argparse
import compileall
import importlib
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

ROOT = Path(__file__).resolve().parents[1]
_PASSED, _FAILED = 0, 1  # pytest's exit statuses; every other one means that tests could not run
_LIBRARIES = (
    "torch",
    "transformers",
    "peft",
    "opacus",
    "dp_accounting",
    "scipy.stats",
    "sklearn.metrics",
    "hypothesis",
)
_END = 1500  # characters of what pytest printed, where its tests could not run


@dataclass(frozen=True)
class Fault:
    """One mistake. text: occurs in `file` exactly once, and is replaced by `instead`. tests: pytest arguments that catch it."""

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]

    def planted(self, tree: Path) -> tuple[str, str]:
        """The file without the fault and with it; BrokenFaultError unless the text is there once."""
        file = tree / self.file
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if (found := before.count(self.text)) != 1:
            raise BrokenFaultError(f"stale: its text is {found} times in {self.file}")
        return before, before.replace(self.text, self.instead)


class BrokenFaultError(Exception):
    """A fault that shows nothing: its text is stale, or its tests cannot run or fail without it."""


def faults(root: Path = ROOT) -> list[Fault]:
    """The faults of the tree at `root`, in their order."""
    tables = tomllib.loads((root / "tests" / "planted.toml").read_text(encoding="utf-8"))
    return [Fault(name, **{**table, "tests": tuple(table["tests"])}) for name, table in tables.items()]


class Copy:
    """A copy of the packages, the tests and what they read, in which one fault at a time stands."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = path
        build = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
        for name in (*build["targets"]["wheel"]["packages"], "tests", "docs", "examples"):
            shutil.copytree(root / name, path / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(root / "pyproject.toml", path)
        # Bytecode is checked by content: a fault may be as long as the text it replaces, and be written in the same second.
        compileall.compile_dir(path, quiet=2, invalidation_mode=PycInvalidationMode.CHECKED_HASH)
        self._broken: dict[tuple[str, ...], str] = {}  # why these tests show nothing; empty if they pass without it

    def try_without(self, faults: Sequence[Fault]) -> None:
        """Run the tests of all these faults in one process, with none of them planted. Where all pass, `catches` runs each
        selection with its fault alone.
        """
        if self._run(tuple(sorted({test for fault in faults for test in fault.tests})))[0] == _PASSED:
            self._broken |= {fault.tests: "" for fault in faults}

    def catches(self, fault: Fault) -> str:
        """The first of the fault's tests that fails with it; empty if all pass. BrokenFaultError if one fails without it."""
        before, after = fault.planted(self.path)
        if fault.tests not in self._broken:
            status, told = self._run(fault.tests)
            self._broken[fault.tests] = "" if status == _PASSED else f"its tests do not pass without it: {told[-_END:]}"
        if self._broken[fault.tests]:
            raise BrokenFaultError(self._broken[fault.tests])
        (self.path / fault.file).write_text(after, encoding="utf-8")
        try:
            status, told = self._run(fault.tests)
        finally:
            (self.path / fault.file).write_text(before, encoding="utf-8")
        if status not in (_PASSED, _FAILED):
            raise BrokenFaultError(f"its tests cannot run: {told[-_END:]}")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", told, re.MULTILINE)
        return failed[0] if status == _FAILED else ""

    def _run(self, tests: tuple[str, ...]) -> tuple[int | None, str]:
        """pytest's exit status on these tests, and what it printed."""
        can_fork = "fork" in multiprocessing.get_all_start_methods()
        context = multiprocessing.get_context("fork" if can_fork else "spawn")
        log = self.path / "log.txt"
        process = context.Process(target=_test, args=(self.path, log, tests))
        process.start()
        process.join()
        return process.exitcode, log.read_text(encoding="utf-8", errors="replace")


def _test(tree: Path, log: Path, tests: tuple[str, ...]) -> None:
    """Run these tests on that tree and end the process, which has imported nothing of any tree, with pytest's status."""
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(tree)
    sys.path[0] = os.environ["PYTHONPATH"] = str(tree)  # for this process, and for those that tests start
    sys.dont_write_bytecode = True
    import pytest

    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests])
    sys.stdout.flush()
    sys.exit(int(status))


def main(names: Sequence[str] = (), root: Path = ROOT) -> int:
    """Plant the named faults, or all, in a copy of the tree at `root`; print a line for each, and return the exit status."""
    known = {fault.name: fault for fault in faults(root)}
    if unknown := [name for name in names if name not in known]:
        print(f"no fault is called {', '.join(unknown)}; there are {', '.join(known)}")
        return 1
    chosen = [known[name] for name in names or known]
    width, began, caught = max(len(fault.name) for fault in chosen), time.perf_counter(), 0
    with tempfile.TemporaryDirectory(prefix="secure-fed-planted-") as folder:
        copy = Copy(root, Path(folder) / "tree")
        copy.try_without(chosen)
        for fault in chosen:
            started = time.perf_counter()
            try:
                by = copy.catches(fault)
                outcome = f"caught by {by}" if by else "missed"
            except BrokenFaultError as error:
                outcome = f"error: {error}"
            caught += outcome.startswith("caught")
            print(f"{fault.name:{width}}  {time.perf_counter() - started:6.1f} s  {outcome}", flush=True)
    print(f"{caught} of {len(chosen)} caught in {time.perf_counter() - began:.0f} s")
    return int(caught < len(chosen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Plant faults in a copy of the tree, and see whether tests catch them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    arguments = parser.parse_args()
    os.environ |= {"CI": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for library in _LIBRARIES:
        importlib.import_module(library)
    raise SystemExit(main(arguments.names))
