"""The cost of an audit's reference adapters, relative to the run that they imitate.

    python benchmarks/shadows.py [--references 16] [--threads 2] [--quick]

The run is built-in, without privacy: 40 clients of 100 notes, ten of them in each of 10 rounds, LoRA of rank 8, evaluated once.
Half of the notes may be audited, so a reference trains on as many as the run. The same is repeated with masks, which references
do not need. References train in lockstep: the clients of all references in a round share passes over the model. The run's
clients do so too, so 16 references can only save the run's start, its evaluation, and unused capacity of its passes.
"""

from __future__ import annotations

import argparse
import time

import torch
from timing import Limit, at_most, machine, show

from attacks.adversary.shadows import references
from secure_fed import Federation, RunConfig


def configured(masks: bool) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"examples": 4_000, "test_examples": 1_000},
            "federation": {"clients": 40, "cohort": 10, "rounds": 10},
            "secure_aggregation": {"enabled": masks},
            "evaluation": {"every": 10, "audit_fraction": 0.5},
        }
    )


def measured(count: int, masks: bool) -> Limit:
    """Time one run, from its configuration to its end, and its references."""
    started = time.perf_counter()
    federation = Federation(configured(masks))
    start = time.perf_counter() - started
    federation.run()
    whole = time.perf_counter() - started
    began = time.perf_counter()
    found = references(federation.assembly, count, seed=1)
    seconds = time.perf_counter() - began
    print(f"{'with' if masks else 'without'} masks: run {whole:7.1f} s, of them {start:.1f} s of start")
    print(f"{count:15} references {seconds:7.1f} s, {seconds / whole:.1f} runs  {found.why_not_together}")
    return at_most(f"{count} references over a run {'with' if masks else 'without'} masks", seconds / whole, 4.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--references", type=int, default=16)
    parser.add_argument("--quick", action="store_true", help="two references, without masks")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    print(machine("torch", "transformers", "peft"))
    count, kinds = (2, (False,)) if given.quick else (given.references, (False, True))
    show([measured(count, masks) for masks in kinds])


if __name__ == "__main__":
    main()
