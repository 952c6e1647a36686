"""The runs of `secure-fed demo`: one with client-level privacy, and the same run without any protection.

There are many clients with five notes each, since the number of clients hides each of them. Step lengths are not set, and
chosen as in every run with client-level privacy (`rounds/open_settings.py`). Only B trains, so noise reaches the model linearly
(`ffa_lora`). A consists of the largest singular vectors of the model's own weights (`federa`): a random A represents less of
the change that clients have to make.

Clients take part in turn, by a public order: 250 in each of 20 rounds, and every client once. So nothing about a cohort is
secret. Contributions are masked, and every client adds its share of the noise before the masks. So one epsilon holds against
whoever gets the final model, the other clients, who see who takes part, and the server. A twentieth of a cohort may collude
with the server, and another twentieth may drop out in mid-round: the noise shares make up for both. If the server is trusted
to add the noise itself (`privacy.noise = "central"`), noise can be correlated over rounds, and the final model has 0.4 times
as much of it.

All clients train. The audit adds 500 dummy clients, which hold nobody's data: about half of them, chosen at random, pull the
model, each along a random direction, as far as a client may: the largest influence that one client can have. Real notes,
which are each seen only a few times, leave hardly a trace even without privacy.
"""

from __future__ import annotations

from secure_fed.config import RunConfig

DUMMIES = 500  # the default of a private run of this size; set here, since a run without privacy has none


def config() -> RunConfig:
    """The configuration that the demo runs; `secure-fed train --set ...` can run the same."""
    return RunConfig.from_dict(
        {
            "data": {"examples": 25_000},
            "federation": {"clients": 5_000, "cohort": 250, "rounds": 20},
            "method": {"name": "federa", "rule": "ffa_lora"},
            "privacy": {"unit": "client", "epsilon": 8.0, "noise": "distributed"},
            "secure_aggregation": {"enabled": True, "corrupt": 0.05, "dropout": 0.05},
            "evaluation": {"every": 5, "record": "models", "dummies": DUMMIES},
        }
    )


def unprotected(private: RunConfig) -> RunConfig:
    """The same clients, rounds and steps without any protection: the audit's comparison for the private run.

    private: the private run's configuration, with values for all settings that `config` does not set.
    """
    tables = private.to_dict()
    for section in ("privacy", "secure_aggregation"):
        del tables[section]
    tables["evaluation"]["audit_unit"] = "client"
    return RunConfig.from_dict(tables)
