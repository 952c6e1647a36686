"""The runs of `secure-fed demo`: one that is private for every client, and the same again without any protection.

Many clients that each hold five notes, since what hides one of them is the number of the others. Each makes one Adam step,
whose length is lr sqrt(trained numbers) whatever the data: the clip norm is that length, so little is lost to clipping, and
the server's momentum averages the noise of several rounds. `ffa_lora`, because noise on B alone reaches the model linearly.

Clients take part in turn, by a public order: 250 in each of 20 rounds, and every client once. So nothing about a cohort is
secret, and the guarantee holds against readers of the model and whoever sees who takes part. Contributions are masked. A
twentieth of a cohort may collude with the server, and another twentieth may vanish in mid-round. The server adds the noise,
which is correlated over rounds: the final model carries 0.4 times the noise of shares that clients would add inside the masked
sum. With these (`privacy.noise = "distributed"`) the guarantee holds against the server too, at a few points of accuracy.

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
            "federation": {
                "clients": 5_000,
                "cohort": 250,
                "rounds": 20,
                "server_optimizer": "momentum",
                "server_momentum": 0.7,
            },
            "method": {"name": "ffa_lora"},
            "training": {"lr": 0.02},
            "privacy": {"unit": "client", "epsilon": 8.0, "noise": "central", "clip_norm": 3.1},
            "secure_aggregation": {"enabled": True, "corrupt": 0.05, "dropout": 0.05},
            "evaluation": {"every": 4, "record": "models", "phantoms": PHANTOMS},
        }
    )


def unprotected() -> RunConfig:
    """The same clients, rounds and steps, with nothing that protects anybody: what an audit sets beside the private run."""
    tables = config().to_dict()
    for section in ("privacy", "secure_aggregation"):
        del tables[section]
    tables["federation"]["sampling"] = "schedule"  # as the private run
    tables["evaluation"]["audit_unit"] = "client"
    return RunConfig.from_dict(tables)
