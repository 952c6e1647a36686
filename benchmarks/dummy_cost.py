"""The cost of dummies in accuracy: the same private run with the default number of dummies, and with none.

    python benchmarks/dummy_cost.py [--seeds 3] [--dummies N]

Clients of the built-in notes with client-level privacy, as in `secure-fed demo` but a tenth as many, without masks (which
change only rounding) and with a fixed noise multiplier, so that the noise relative to the clients is as in the demo. Noise and
cohorts are seeded, so that a pair differs only in the dummies; so the resulting models are not private. Prints a line for
every pair, then the mean difference with its standard error.
"""

from __future__ import annotations

import argparse
import statistics

from privacy.entropy import SeededEntropy
from secure_fed import Federation, RunConfig
from secure_fed.commands import demo
from secure_fed.config.run_config import find


def settings(seed: int, dummies: int | None) -> RunConfig:
    """A tenth of the demo."""
    small = {
        ("data", "examples"): 2_500,
        ("federation", "clients"): 500,
        ("federation", "cohort"): 50,
        ("federation", "seed"): seed,
        ("privacy", "epsilon"): None,
        ("privacy", "delta"): 1e-4,
        ("privacy", "noise_multiplier"): 0.15,
        ("evaluation", "every"): 20,
        ("evaluation", "record"): "nothing",
        ("evaluation", "dummies"): dummies,
    }
    tables = demo.config().to_dict()
    del tables["secure_aggregation"]
    tables["privacy"]["noise"] = "central"
    plain = RunConfig.from_dict(tables)
    for section, name in small:
        find(section, name)
    return plain.replace(small)


def main() -> None:
    parser = argparse.ArgumentParser(description="What dummies cost in accuracy.")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--dummies", type=int, default=None, help="beside the clients (as many as there are by default)"
    )
    chosen = parser.parse_args()
    lost = []
    for seed in range(chosen.seeds):
        accuracy = {}
        for dummies in (0, chosen.dummies):
            federation = Federation(settings(seed, dummies), entropy=SeededEntropy(seed))
            accuracy[dummies] = 100 * federation.run().summary["accuracy"]
            count = federation.assembly.protection.dummies.dummies
        lost.append(accuracy[0] - accuracy[chosen.dummies])
        print(
            f"seed {seed}: {accuracy[0]:.2f} % without, {accuracy[chosen.dummies]:.2f} % with {count} dummies",
            flush=True,
        )
    error = statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else float("nan")
    print(f"lost: {statistics.mean(lost):.2f} points, standard error {error:.2f}")


if __name__ == "__main__":
    main()
