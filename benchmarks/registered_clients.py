"""The cost of many registered clients, of which a round draws a hundred.

    python benchmarks/registered_clients.py [--most 1000000]

Every client has two to four tiny examples, created when it is drawn; the model is a toy. Each row runs in its own process:
seconds from the objects to the first round, seconds of the second of two rounds, and the peak memory of the process in MB, of
which `imports` were used before the federation was created. Then the peak memory of cohorts of 10, 100 and 10,000, and the time
of a draw, which tosses a secret coin for each client.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from timing import Limit, at_most, machine, show, timed


def megabytes() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measured(clients: int, unit: str, cohort: int) -> dict[str, float]:
    """One run in this process."""
    import torch
    from torch import nn
    from transformers import PreTrainedModel  # noqa: F401 - part of the imports

    import privacy.accounting  # noqa: F401 - a private run loads it
    from secure_fed import Federation, RunConfig

    torch.set_num_threads(1)

    class Examples(Sequence[Any]):
        def __len__(self) -> int:
            return clients

        def __getitem__(self, index: Any) -> Any:
            if not 0 <= index < clients:
                raise IndexError(index)
            made = torch.Generator().manual_seed(index)
            return [{"x": torch.randn(6, generator=made), "labels": index % 3} for _ in range(2 + index % 3)]

    class Toy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.classifier = nn.Linear(6, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = self.classifier(self.query(x).tanh())
            return scores

    class Clock:
        def on_round_end(self, record: Any, state: Any) -> None:
            ticks.append(time.perf_counter())

    settings: dict[str, Any] = {
        "method": {"name": "fedlora", "rank": 2, "modules_to_save": ["classifier"], "target_modules": ["query"]},
        "federation": {"rounds": 2, "cohort": cohort},
        "training": {"steps": 1},
    }
    if unit == "client":
        settings["privacy"] = {"unit": "client", "noise_multiplier": 1.0, "delta": 1e-8}
    before, started = megabytes(), time.perf_counter()
    examples = Examples()
    config = RunConfig.from_dict(settings)
    federation = Federation(config, model=Toy(), train=examples, test=[examples[0][0]], callbacks=[Clock()])
    ticks = [time.perf_counter()]
    federation.run()
    return {"start": ticks[0] - started, "round": ticks[2] - ticks[1], "peak": megabytes(), "imports": before}


def in_a_process(clients: int, unit: str, cohort: int = 100) -> dict[str, float]:
    command = [sys.executable, str(Path(__file__)), "--one", json.dumps([clients, unit, cohort])]
    found: dict[str, float] = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    return found


def drawing(clients: int) -> float:
    """Seconds to draw about a hundred clients by secret coins, the least of five."""
    from privacy.entropy import SystemEntropy
    from privacy.participation import Poisson

    stream, sampler = SystemEntropy().stream("cohort"), Poisson(clients, min(1.0, 100 / clients))
    return min(timed(lambda: sampler.draw(stream.uniform))() for _ in range(5))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--most", type=int, default=1_000_000)
    arguments.add_argument("--one", help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.one:
        print(json.dumps(measured(*json.loads(given.one))))
        return
    print(machine("torch"))
    print(f"{'clients':>10}{'unit':>8}{'start':>8}{'round':>8}{'peak':>8}{'imports':>9}")
    limits: list[Limit] = []
    for unit in ("none", "client"):
        for clients in (count for count in (1000, 10_000, 100_000, 1_000_000) if count <= given.most):
            found = in_a_process(clients, unit)
            print(f"{clients:10,}{unit:>8}{found['start']:8.2f}{found['round']:8.2f}", end="")
            print(f"{found['peak']:8.0f}{found['imports']:9.0f}", flush=True)
            if clients == 1_000_000:
                limits.append(at_most(f"MB with a million clients, privacy.unit = {unit}", found["peak"], 1000))
    cohorts = {cohort: in_a_process(100_000, "none", cohort) for cohort in (10, 100, 10_000)}
    for cohort, found in cohorts.items():
        print(f"a cohort of {cohort:,} of 100,000: {found['round']:.2f} s a round, {found['peak']:.0f} MB at the peak")
    print(f"drawing from {given.most:,}: {1e3 * drawing(given.most):.0f} ms")
    limits.append(
        at_most("peak memory, a cohort of 100 over one of 10", cohorts[100]["peak"] / cohorts[10]["peak"], 1.5)
    )
    show(limits)


if __name__ == "__main__":
    main()
