"""The limit from which a run is called hopeless: what the noise alone does to the loss, and the accuracy that the run reaches.

    python benchmarks/noise_alone.py                 # the table of docs/privacy.md
    python benchmarks/noise_alone.py 3:3 600:30      # some of its rows, as clients:cohort

The built-in notes, five of each client (60 at least), epsilon 8 for whole clients, independent noise by the server, 20 rounds
of one step.
"""

from __future__ import annotations

import sys

from secure_fed.config import RunConfig
from secure_fed.federation import Federation

ROWS = ("3:3", "20:1", "40:2", "10:10", "60:3", "30:30", "200:10", "600:30")


def row(clients: int, cohort: int) -> str:
    """One row of the table."""
    config = RunConfig.from_dict(
        {
            "data": {"examples": max(60, 5 * clients), "test_examples": 300},
            "federation": {"clients": clients, "cohort": cohort, "rounds": 20},
            "method": {"name": "federa", "rule": "ffa_lora"},
            "privacy": {"unit": "client", "epsilon": 8.0, "noise": "central", "correlation": "none"},
            "training": {"steps": 1},
            "evaluation": {"dummies": 0, "every": 20},
        }
    )
    result = Federation(config).run().summary
    found, common = result["noise_alone"], result["commonest"]["share"]
    losses = [found["start"], found["noised"], found["full"] or found["noised"]]
    numbers = [*(f"{loss:.4g}" for loss in losses), f"{losses[2] / losses[0]:.3g}", f"{100 * result['accuracy']:.1f}"]
    verdict = "hopeless" if found["hopeless"] else ""
    return " | ".join(["", str(clients), str(cohort), *numbers, f"{100 * common:.1f}", verdict, ""]).strip()


if __name__ == "__main__":
    print("| clients | cohort | start | noise alone | at full steps | over the start | accuracy | commonest | |")
    print("|---|---|---|---|---|---|---|---|---|")
    for chosen in sys.argv[1:] or ROWS:
        print(row(*map(int, chosen.split(":"))), flush=True)
