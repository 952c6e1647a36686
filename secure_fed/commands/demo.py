"""The runs of `secure-fed demo`: one that is private for every client, and the same again without any protection.

Many clients that each hold five notes, since what hides one of them is the number of the others. How long steps are is left
open, and chosen as in every run that protects clients (`rounds/step_lengths.py`). Only B trains, so noise reaches the model
linearly (`ffa_lora`), beside an A of the largest singular vectors of the model's own weights (`federa`): drawn at random it
holds less of what the clients have to change.

Clients take part in turn, by a public order: 250 in each of 20 rounds, and every client once. So nothing about a cohort is
secret. Contributions are masked, and every client adds its share of the noise before the masks. So one epsilon holds against
readers of the model, whoever sees who takes part, and the server. A twentieth of a cohort may collude with the server, and
another twentieth may vanish in mid-round: the shares make up for both. If the server is trusted to add the noise itself
(`privacy.noise = "central"`), it can be correlated over rounds, and the final model carries 0.4 times as much of it.

All clients train. Beside them stand phantoms for the audit, a tenth as many, which are nobody's data: coins decide which of
them pull the model along a random direction each, as far as a client may. That is the most that one client can make itself
felt; real notes, of which nobody's is seen more than a few times, leave hardly a trace even without privacy.
"""

from __future__ import annotations

from secure_fed.config import RunConfig

PHANTOMS = 500  # what a private run of so many clients has by default; named, since one without privacy has none


def config() -> RunConfig:
    """The configuration that the demo runs; `secure-fed train --set ...` can run the same."""
    return RunConfig.from_dict(
        {
            "data": {"examples": 25_000},
            "federation": {"clients": 5_000, "cohort": 250, "rounds": 20},
            "method": {"name": "federa", "rule": "ffa_lora"},
            "privacy": {"unit": "client", "epsilon": 8.0, "noise": "distributed"},
            "secure_aggregation": {"enabled": True, "corrupt": 0.05, "dropout": 0.05},
            "evaluation": {"every": 5, "record": "models", "phantoms": PHANTOMS},
        }
    )


def unprotected(private: RunConfig) -> RunConfig:
    """The same clients, rounds and steps, with nothing that protects anybody: what an audit sets beside the private run.

    private: the private run's configuration, with everything settled that `config` leaves open.
    """
    tables = private.to_dict()
    for section in ("privacy", "secure_aggregation"):
        del tables[section]
    tables["evaluation"]["audit_unit"] = "client"
    return RunConfig.from_dict(tables)
