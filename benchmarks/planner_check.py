"""Does `secure-fed budget plan` recommend the way that trains best? A comparison with the runs of promises.jsonl.

    python benchmarks/planner_check.py [--docs docs]

Two of the three ways there hold against adversaries that see which clients take part: clients in turn with independent noise,
and with correlated noise. The planner recommends one of them for each data set and epsilon. It is right if this way has the
higher mean accuracy, and not wrong if the other is not higher by more than twice the standard error of the difference over
seeds. --docs writes the table into recipes.md.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

from promises import EPSILONS
from runs_file import fill, lines

HERE = Path(__file__).parent
PLANS = {"notes": (5000, 250, 23_688), "sst2": (2000, 100, 6144)}  # clients, cohort, numbers sent


def recommended(data: str, epsilon: float) -> str:
    """The way with the least final noise by the planner, among ways in turn where the server adds the noise."""
    clients, cohort, dim = PLANS[data]
    numbers = {"epsilon": epsilon, "delta": 1e-5, "rounds": 20, "clients": clients, "cohort": cohort, "dim": dim}
    command = [sys.executable, "-m", "secure_fed", "budget", "plan", "--json"]
    command += [text for name, value in numbers.items() for text in (f"--{name}", str(value))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    ways = [
        way for way in json.loads(done.stdout)["ways"] if (way["sampling"], way["noise"]) == ("schedule", "central")
    ]
    named = [way for way in ways if way["recommended"]] or [min(ways, key=lambda way: way["final_noise"])]
    return "schedule" if named[0]["correlation"] == "none" else "correlated"


def row(data: str, epsilon: float, found: dict[str, list[float]]) -> tuple[str, str]:
    """The line of the table, and the verdict: decided where the mean difference exceeds two standard errors."""
    name = recommended(data, epsilon)
    other = {"schedule": "correlated", "correlated": "schedule"}[name]
    ahead = [100 * (a - b) for a, b in zip(found[name], found[other], strict=True)]
    mean, error = statistics.mean(ahead), statistics.stdev(ahead) / math.sqrt(len(ahead))
    verdict = "right" if mean > 2 * error else "wrong" if mean < -2 * error else "not decided"
    return f"| {data} | {epsilon:g} | {name} | {mean:+.1f} ± {error:.1f} points | {verdict} |", verdict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", type=Path)
    given = parser.parse_args()
    runs = lines(HERE / "promises.jsonl")
    rows = ["| data | epsilon | recommended | ahead of the other | |", "|---|---:|---|---:|---|"]
    verdicts = []
    for data in PLANS:
        for epsilon in EPSILONS:
            found: dict[str, list[float]] = {"schedule": [], "correlated": []}
            for run in sorted(runs, key=lambda run: run["seed"]):
                if (run["data"], run["target"]) == (data, epsilon) and run["way"] in found:
                    found[run["way"]].append(run["accuracy"])
            line, verdict = row(data, epsilon, found)
            rows.append(line)
            verdicts.append(verdict)
    right, open_, wrong = (verdicts.count(one) for one in ("right", "not decided", "wrong"))
    shown = "\n".join(
        [
            *rows,
            "",
            f"Of {len(verdicts)} recommendations {right} is right, {wrong} wrong and {open_} not decided. ± is the standard "
            "error; a difference is decided if it exceeds two of them.",
        ]
    )
    print(shown)
    if given.docs:
        fill(given.docs / "recipes.md", {"planner": shown})


if __name__ == "__main__":
    main()
