"""Four methods side by side on the same clients: their accuracy and the bytes that they send.

python examples/compare_methods.py

`secure-fed compare A.toml B.toml` does the same over several seeds, with a table and a plot, and can be resumed.
"""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from secure_fed import Federation, RunConfig, heartbeat

METHODS = ("fedlora", "ffa_lora", "fra_lora", "federa")  # `secure-fed methods` lists all methods
SETTINGS = [
    "data.examples=1800",
    "data.test_examples=400",
    "data.partition=iid",
    "training.epochs=2",
    "federation.clients=12",
    "federation.cohort=4",
    "federation.rounds=6",
    "evaluation.every=6",
]


def main() -> None:
    print(f"{'method':<14}{'accuracy':>9}{'trained':>9}{'kB up':>9}{'kB down':>9}{'seconds':>9}")
    for name in METHODS:
        result = Federation(RunConfig.load(overrides=[*SETTINGS, f"method.name={name}"])).run().summary
        sent = f"{result['bytes_up'] / 1000:>9.0f}{result['bytes_down'] / 1000:>9.0f}"
        print(f"{name:<14}{result['accuracy']:>9.3f}{result['trainable']:>9}{sent}{result['seconds']:>9.1f}")


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main()
