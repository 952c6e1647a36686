"""The sections that protect: [privacy] and [secure_aggregation]."""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config.setting import key


@dataclass(frozen=True)
class PrivacyConfig:
    unit: str = key(
        "none",
        "unit that differential privacy protects: a client with all its examples, one example, or all examples of one person",
        choices=("none", "client", "example", "group"),
    )
    epsilon: float | None = key(
        None, "the guarantee: the noise is calibrated to it; with noise_multiplier, a limit", above=0.0, optional=8.0
    )
    delta: float = key(1e-5, "the guarantee may fail with this probability; well below 1 / units", above=0.0, below=1.0)
    noise_multiplier: float | None = key(
        None,
        "standard deviation of the noise on a sum, in clip norms; set it or epsilon",
        at_least=1e-3,
        at_most=1e6,
        optional=1.0,
    )
    clip_norm: float | None = key(
        None,
        "largest norm of a contribution (client) or gradient (example, group) (1; of contributions trained by adamw the length "
        "of one step, lr times the square root of the number of trained parameters)",
        at_least=1e-9,
        at_most=1e9,
        optional=1.0,
    )
    clip_quantile: float | None = key(
        None,
        "clip norm that adapts until this share of contributions is shorter (client)",
        above=0.0,
        below=1.0,
        optional=0.5,
    )
    noise: str = key(
        "auto",
        "who adds the noise: the server to the sum (central), each client a share of it inside the secure sum (distributed), "
        "or each client to its contribution (local); auto: as `secure-fed budget plan` recommends among what the "
        "other settings allow (distributed: with secure_aggregation.enabled), or central with noise_multiplier",
        choices=("auto", "central", "distributed", "local"),
    )
    correlation: str = key(
        "auto",
        "banded: the noise of a round cancels a part of the noise of earlier rounds (federation.sampling = schedule, "
        "central noise); auto: banded where `secure-fed budget plan` recommends it",
        choices=("auto", "none", "banded"),
    )
    band: int | None = key(
        None,
        "rounds that correlated noise spans; not set: the band with the least noise on the final model",
        at_least=1,
        optional=20,
    )
    hidden_cohort: bool = key(
        False, "every client takes part in every round and tosses its own coin whether to train (distributed)"
    )
    group_column: str = key("", "column that says whose an example is (patient), for unit = group")
    group_examples: int = key(8, "most examples used of one person (group)", at_least=1)
    participations: int | None = key(
        None, "most rounds that a client takes part in (example, group, local noise)", at_least=1, optional=5
    )
    ledger: str = key(
        "",
        "budget file that runs share, from `secure-fed budget create`; empty: a file in the run directory, for this run",
    )
    data_set: str = key("", "name of the ledger's data set; empty: a digest identifies it")
    unit_name: str = key(
        "",
        "name of the unit in the ledger, the same in all its runs; empty: group_column, data.client, or the unit",
    )
    ledger_heads: str = key(
        "", "file with ledgers' newest heads, to detect an older copy; empty: a file in the user's state folder"
    )
    on_exhausted: str = key(
        "refuse",
        "if the rounds do not fit the budget: refuse the run, or stop when it is spent",
        choices=("refuse", "stop"),
    )
    even_if_hopeless: bool = key(
        False,
        "go on where the noise alone takes the model to chance, although a shared ledger, or the nodes of a deployment, pay",
    )

    @property
    def clip(self) -> float:
        """The clip norm, with its default if it is not set."""
        return 1.0 if self.clip_norm is None else self.clip_norm


@dataclass(frozen=True)
class SecureAggregationConfig:
    enabled: bool = key(False, "pairwise masks: the server learns sums of contributions, and no single contribution")
    corrupt: float = key(0.1, "share of a round's clients assumed to collude with the server", at_least=0.0, below=0.5)
    dropout: float = key(
        0.1,
        "share of a round's clients that may vanish; if more vanish, there is no sum",
        at_least=0.0,
        below=0.5,
    )
    active: bool = key(False, "also protect against a lying server: signed keys, and one more message")
    neighbours: int | None = key(
        None, "clients that each client shares masks with (chosen; all, where there are few)", at_least=2, optional=64
    )
    threshold: int | None = key(None, "shares that open a client's masks (chosen)", at_least=2, optional=33)
    bits: int = key(32, "bits of a coordinate in the masked sum", choices=(32, 64))
    range: float = key(
        8.0, "largest coordinate of a contribution, where no clip norm bounds it", at_least=1e-6, at_most=1e6
    )
    most_examples: int = key(
        1000, "most examples that a client counts as (federation.weighting = examples)", at_least=1
    )
