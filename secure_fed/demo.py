"""The run of `secure-fed demo`: private for every client, in a minute or two on two cores.

Many clients that each hold little, since what hides one of them is the number of the others: with 400 in a round, each with an
update of the length of one Adam step, the noise is small beside what they agree on. `ffa_lora`, because noise on B alone
reaches the model linearly.
"""

from __future__ import annotations

from secure_fed.config import RunConfig


def config() -> RunConfig:
    """What the demo runs; `secure-fed train --set ...` can run the same."""
    return RunConfig.from_dict(
        {
            "data": {"examples": 15_000, "test_examples": 1_000},
            "federation": {
                "clients": 5_000,
                "cohort": 400,
                "rounds": 14,
                "server_optimizer": "momentum",
                "server_momentum": 0.7,
            },
            "method": {"name": "ffa_lora"},
            "training": {"lr": 0.01},
            "privacy": {"unit": "client", "epsilon": 8.0, "clip_norm": 1.5},
            "evaluation": {"every": 2},
        }
    )
