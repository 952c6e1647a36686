"""Every benchmark of speed and growth, collected into docs/performance.md.

    python benchmarks/bench.py [PART ...] [--quick] [--keep] [--data FOLDER] [--peers FOLDER] [--docs docs]

A part is a benchmark in this folder, run in its own process. Its output is kept in build/bench, so that an interrupted
collection can resume: a part that finished at this commit is not run again; with --keep, neither is one that finished at any
commit. Named parts are always run again. The page keeps its text, and gets the parts' output between its marks, with limits and
the commit of the measurement. --quick is for trying the scripts: small sizes, only printed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from peers import environments
from timing import ended, limits_of, machine

HERE = Path(__file__).parent
ROOT = HERE.parent
KEPT = ROOT / "build" / "bench"
MOST = 1200  # seconds, the longest time of a part
MEASURED = ("secure_fed", "privacy", "protocols", "attacks", "benchmarks")


@dataclass(frozen=True)
class Part:
    """A script with its arguments, and arguments for --quick.

    peer: the peer whose environment runs it. threads: 0 for all. data: its option for real texts.
    """

    script: str
    arguments: str = ""
    quick: str = ""
    peer: str = ""
    threads: int = 1
    data: str = ""


PARTS = {
    "whole_runs": Part("whole_runs.py", "--repeats 2", "--repeats 1 --rounds 2", threads=0, data="--data"),
    "start_up": Part("start_up.py"),
    "round_overhead": Part("round_overhead.py", "--rounds 30", "--rounds 5"),
    "cohort": Part("cohort.py", "--repeats 3", "--repeats 1", threads=0, data="--texts"),
    "shadows": Part("shadows.py", "", "--quick", threads=0),
    "private_step": Part("private_step.py", "--repeats 7", "--repeats 2"),
    "read_once": Part("read_once.py", "--repeats 2", "--repeats 1"),
    "fedara_time": Part("fedara_time.py", "--repeats 2", "--repeats 1 --rounds 5"),
    "secure_aggregation": Part(
        "secure_aggregation.py",
        "--dim 100000 300000 1200000 --clients 10 50 200 --server-repeats 1 --budget 10",
        "--dim 10000 100000 --clients 10 20 --flower-server 10 --server-repeats 1 --repeats 2",
        peer="flower",
    ),
    "secure_sum": Part("secure_sum.py", "--repeats 2", "--repeats 1", threads=0),
    "flower_overhead": Part(
        "flower_overhead.py", "--nodes 3 --ranks 2 32 --rounds 2", "--nodes 3 --ranks 2 --rounds 2"
    ),
    "fra_merge": Part("fra_merge.py", "--turns 2", "--turns 1"),
    "private_fra": Part("private_fra.py", "--size 2048", "--size 512"),
    "registered_clients": Part("registered_clients.py"),
    "accounting": Part("accounting.py"),
    "growth": Part("growth.py", f"--plot {ROOT / 'docs' / 'performance.png'}", "--quick"),
}


@dataclass(frozen=True)
class Outcome:
    """A part's output, with its commit and command; code 0 if it finished."""

    commit: str
    command: str
    seconds: float
    code: int
    printed: str


def commit() -> str:
    """The last commit of the measured packages, and whether they have changed since."""

    def git(*command: str) -> str:
        asked = ["git", "-C", str(ROOT), *command, "--", *MEASURED]
        return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()

    return (git("log", "-1", "--format=%h") or "no commit") + (" and changes" if git("status", "--porcelain") else "")


def real_texts(part: Part, folder: Path) -> list[str]:
    """The arguments for real texts: the folder, or a file of training texts."""
    if part.data != "--texts":
        return [part.data, str(folder)]
    KEPT.mkdir(parents=True, exist_ok=True)
    place = KEPT / "texts.jsonl"
    place.write_bytes(gzip.decompress((folder / "train.jsonl.gz").read_bytes()))
    return [part.data, str(place)]


def run(part: Part, given: argparse.Namespace) -> Outcome:
    """Run the part in its own process."""
    arguments = (part.quick if given.quick else part.arguments).split()
    arguments += ["--peers", str(given.peers)] if part.script == "whole_runs.py" else []
    arguments += real_texts(part, given.data) if given.data and part.data else []
    own = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{given.peers / 'minilm'}", "HF_HUB_OFFLINE": "1"}
    own.pop("OMP_NUM_THREADS", None)
    own |= {"OMP_NUM_THREADS": str(part.threads)} if part.threads else {}
    started = time.monotonic()
    try:
        python = environments.python(part.peer, given.peers) if part.peer else sys.executable
    except (RuntimeError, OSError) as error:
        print(f"    without {part.peer}: {error}")
        python = sys.executable
    command = [str(python), "-W", "ignore", str(HERE / part.script), *arguments]
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, env=own, cwd=ROOT, stdout=out, stderr=errors, start_new_session=True)
        (code,) = ended([process], MOST)
        for stream in (out, errors):
            stream.seek(0)
        printed, why = out.read(), f"stopped after {MOST} s" if code is None else errors.read().strip()
    if code != 0:
        printed += f"did not finish: {(why or 'no message').splitlines()[-1]}\n"
    texts = [part.data, "FILE" if part.data == "--texts" else "DATA"] if given.data and part.data else []
    shown = " ".join(["python", f"benchmarks/{part.script}", part.arguments, *texts]).replace(f"{ROOT}{os.sep}", "")
    return Outcome(commit(), shown, time.monotonic() - started, -1 if code is None else code, printed)


def kept(name: str, given: argparse.Namespace) -> Outcome | None:
    """The outcome of a part that does not need to run again; else None."""
    place = KEPT / f"{name}.json"
    if given.quick or name in given.parts or not place.exists():
        return None
    found = Outcome(**json.loads(place.read_text(encoding="utf-8")))
    return found if found.code == 0 and (given.keep or found.commit == commit()) else None


def collected(given: argparse.Namespace) -> dict[str, Outcome]:
    """The outcomes of all parts, kept or newly run."""
    found: dict[str, Outcome] = {}
    for name, part in PARTS.items():
        place, before = KEPT / f"{name}.json", kept(name, given)
        wanted = not given.parts or name in given.parts
        if before is None and wanted:
            print(f"== {name}", flush=True)
            before = run(part, given)
            print(f"{before.printed}-- {before.seconds:.0f} s\n", flush=True)
            if not given.quick:
                KEPT.mkdir(parents=True, exist_ok=True)
                place.write_text(json.dumps(asdict(before), indent=1), encoding="utf-8")
        elif before is None and place.exists():
            before = Outcome(**json.loads(place.read_text(encoding="utf-8")))
        if before is not None:
            found[name] = before
    return found


def block(outcome: Outcome) -> str:
    return f"`{outcome.command}`, {outcome.seconds:.0f} s, at {outcome.commit}:\n\n```text\n{outcome.printed.rstrip()}\n```"


def limits(page: str) -> str:
    """One table of all limits in the page's blocks, including parts measured earlier."""
    rows = ["| part | limit | found | |", "|---|---|---:|---|"]
    for name in PARTS:
        for limit in limits_of(between(page, name)):
            rows.append(f"| {name} | {limit.what} | {limit.found:.3g} | {'met' if limit.met else '**not met**'} |")
    return "\n".join(rows)


def between(page: str, name: str) -> str:
    """The text between the marks of that name in the page."""
    found = re.search(f"<!-- {name}: begin -->(.*?)<!-- {name}: end -->", page, flags=re.DOTALL)
    return found[1] if found else ""


def put(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of that name."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in page:
        raise ValueError(f"the page has no mark {begin}")
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL)


def written(page: str, found: dict[str, Outcome]) -> str:
    page = put(page, "machine", machine("torch", "transformers", "peft", "opacus", "numpy") + ".")
    for name, outcome in found.items():
        page = put(page, name, block(outcome))
    return put(page, "limits", limits(page))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--peers", type=Path, default=environments.FOLDER)
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # then child processes end too
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    started = time.monotonic()
    try:
        environments.minilm(given.peers)
    except (RuntimeError, OSError) as error:
        print(f"without MiniLM: {error}")
    found = collected(given)
    print(f"all: {time.monotonic() - started:.0f} s")
    page = given.docs / "performance.md"
    text = written(page.read_text(encoding="utf-8"), found)
    print(limits(text))
    if not given.quick:
        page.write_text(text, encoding="utf-8")
    sys.exit(any(outcome.code for outcome in found.values()))


if __name__ == "__main__":
    main()
