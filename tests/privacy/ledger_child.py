"""A child process for the tests of the ledger, without torch: it races others, or charges and releases until it is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from privacy import ledger_file
from privacy.book import Unit
from privacy.errors import PrivacyError
from privacy.filters import Budget, Cost
from privacy.ledger import Account, Ledger
from privacy.ledger_file import Head, Heads

RUN = "run"
RECORD = 16  # bytes of one release
ENOUGH = Cost(8.0, 1e-5)
UNIT = Unit("patient", "person", "who is who", "add-remove")


def start(*arguments: str | int | Path) -> subprocess.Popen[str]:
    """Start this file as a separate process, with the arguments of `main` below."""
    return subprocess.Popen(
        [sys.executable, "-S", __file__, *map(str, arguments)],
        env={"PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def forked(*arguments: str | int | Path) -> int:
    """Run `main` in a fork of this process, which takes milliseconds. Returns its exit code, or -s if signal s killed it."""
    child = os.fork()
    if child == 0:
        try:
            with open(os.devnull, "w") as sys.stdout, open(os.devnull) as sys.stdin:
                main(*map(str, arguments))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def serve() -> None:
    """Answer each line, the arguments of `main` as JSON, with the exit code of a fork of this small process that runs it.

    Nothing waits for the disk: the system keeps a killed process's writes.
    """
    kept = (pragma for pragma in ledger_file.PRAGMAS if not pragma.startswith("synchronous"))
    ledger_file.PRAGMAS, os.fsync = (*kept, "synchronous=OFF"), lambda descriptor: None  # type: ignore[assignment]
    for line in sys.stdin:
        print(forked(*json.loads(line)), flush=True)


def heads_beside(ledger: Path) -> Heads:
    """The file in which the child notes the ledger's newest head."""
    return Heads(ledger.with_name("heads.sqlite"))


def kept_head(folder: Path) -> Head | None:
    file = folder / "head.json"
    return Head.from_dict(json.loads(file.read_text())) if file.exists() else None


def keep_head(folder: Path, head: Head) -> None:
    part = folder / "head.part"
    part.write_text(json.dumps(head.to_dict()))
    os.replace(part, folder / "head.json")


def release(folder: Path) -> None:
    """Publish one more result, durably."""
    with (folder / "releases").open("ab") as file:
        file.write(b"released\n".rjust(RECORD))
        file.flush()
        os.fsync(file.fileno())
    ledger_file.crash_point("released")


def charge_and_release(folder: Path, order: str, rounds: int) -> None:
    """Make `rounds` rounds of a run that charges before each release; with order "broken", it releases first."""
    ledger = Ledger.open(folder / "ledger.db", head=kept_head(folder), heads=heads_beside(folder / "ledger.db"))
    if ledger.reserved(RUN) is None:
        keep_head(folder, ledger.reserve(RUN, ENOUGH, data_digest="d", unit=UNIT, terms={}))
    account = Account(ledger, RUN, lambda _: 1_000_000, None, lambda head: keep_head(folder, head))
    steps: list[Callable[[], None]] = [account.charge, lambda: release(folder)]
    if order == "broken":
        steps.reverse()
    print("ready", flush=True)
    for _ in range(rounds):
        for step in steps:
            step()


def wait() -> None:
    """Block until the parent starts the race, once all children are ready."""
    print("ready", flush=True)
    sys.stdin.readline()


def reserve(path: Path, run: str, *, hasty: bool) -> None:
    """Make one reservation; a `hasty` one checks the budget before the race starts and not again."""
    ledger = Ledger.open(path)
    cost = Cost(1.0, 0.0)
    if hasty and ledger.admits(run, cost):
        Budget.holds = lambda *_: True  # type: ignore[method-assign]
    wait()
    ledger.reserve(run, cost, data_digest="d", unit=UNIT, terms={})


def create(path: Path) -> None:
    wait()
    Ledger.create(path, data_set="ward", epsilon=8.0, delta=1e-5)


def charge(path: Path, run: str, count: int) -> None:
    ledger = Ledger.open(path, heads=heads_beside(path))
    wait()
    for number in range(count):
        ledger.charge(run, "", 1, {"number": number})


def die_at(deadly: int) -> None:
    """Let this process be killed at the crash point number `deadly`, counted from 0."""
    passed = 0

    def crash_point(_: str) -> None:
        nonlocal passed
        if passed == deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        passed += 1

    ledger_file.crash_point = crash_point


def main(what: str, place: str = "", *more: str) -> None:
    path = Path(place)
    match what, more:
        case "serve", ():
            serve()
        case "release", (order, rounds):
            charge_and_release(path, order, int(rounds))
        case "release-and-die", (order, rounds, deadly):
            die_at(int(deadly))
            charge_and_release(path, order, int(rounds))
        case "create", ():
            create(path)
        case "create-and-die", (deadly,):
            die_at(int(deadly))
            create(path)
        case "charge", (run, count):
            charge(path, run, int(count))
        case "reserve" | "reserve-hastily", (run,):
            reserve(path, run, hasty=what == "reserve-hastily")


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except PrivacyError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
