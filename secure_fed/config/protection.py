"""The sections that protect: [privacy] and [secure_aggregation]."""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config.setting import key


@dataclass(frozen=True)
class PrivacyConfig:
    unit: str = key(
        "none",
        "whom differential privacy protects: a client with all it has, one example, or all examples of one person",
        choices=("none", "client", "example", "group"),
    )
    epsilon: float | None = key(
        None, "the guarantee: noise is made to fit it, or with noise_multiplier it is a limit", above=0.0, optional=8.0
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
        "longest contribution (client) or gradient (example, group) (1; of contributions trained by adamw the length of one "
        "step, lr times the root of how many numbers train)",
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
        "who adds the noise: the server to the sum, each client its share of it inside the secure sum, or each client; auto: "
        "central",
        choices=("auto", "central", "distributed", "local"),
    )
    correlation: str = key(
        "auto",
        "banded: the noise of a round takes back a part of the noise of earlier rounds (federation.sampling = schedule, "
        "central noise); auto: wherever it can",
        choices=("auto", "none", "banded"),
    )
    band: int | None = key(
        None,
        "rounds that correlated noise reaches over; the one with the least noise on the final model if not set",
        at_least=1,
        optional=20,
    )
    hidden_cohort: bool = key(
        False, "every client takes part in every round and tosses for itself whether to train (distributed)"
    )
    group_column: str = key("", "column that says whose an example is (patient), for unit = group")
    group_examples: int = key(8, "examples of one person that count (group)", at_least=1)
    participations: int | None = key(
        None, "most rounds that a client takes part in (example, group, local noise)", at_least=1, optional=5
    )
    ledger: str = key(
        "",
        "file of `secure-fed budget create` that runs share a budget in; empty: one in the run directory, for this run",
    )
    data_set: str = key("", "name of the data set that the ledger is of; empty: known by a digest")
    unit_name: str = key(
        "",
        "what the ledger calls the unit; empty: group_column, data.client, or the unit; runs of one ledger share one",
    )
    ledger_heads: str = key(
        "", "file that keeps ledgers' newest heads, to notice an older copy; empty: one in the user's folder for state"
    )
    on_exhausted: str = key(
        "refuse",
        "rounds that do not fit the budget: refuse the run, or stop when it is spent",
        choices=("refuse", "stop"),
    )

    @property
    def clip(self) -> float:
        """The clip norm, with its default if it is not set."""
        return 1.0 if self.clip_norm is None else self.clip_norm


@dataclass(frozen=True)
class SecureAggregationConfig:
    enabled: bool = key(False, "pairwise masks: the server learns sums of contributions, and no single one")
    corrupt: float = key(0.1, "share of a round's clients assumed to collude with the server", at_least=0.0, below=0.5)
    dropout: float = key(
        0.1,
        "share of a round's clients that may vanish; with more of them gone there is no sum",
        at_least=0.0,
        below=0.5,
    )
    active: bool = key(False, "also against a server that lies: signed keys, and one more message")
    neighbours: int | None = key(
        None, "clients that each client shares masks with (chosen; all, where there are few)", at_least=2, optional=64
    )
    threshold: int | None = key(None, "shares that open a client's masks (chosen)", at_least=2, optional=33)
    bits: int = key(32, "of a coordinate in the masked sum", choices=(32, 64))
    range: float = key(
        8.0, "largest coordinate of a contribution, where no clip norm bounds it", at_least=1e-6, at_most=1e6
    )
    most_examples: int = key(
        1000, "a client with more examples counts as one with so many (federation.weighting = examples)", at_least=1
    )
