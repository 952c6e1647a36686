"""The section [federation]: clients, rounds, and the server's aggregation and optimiser."""

from __future__ import annotations

from dataclasses import dataclass

from secure_fed.config.setting import key

MOMENTUM = 0.5  # the server's, where `auto` chooses momentum


@dataclass(frozen=True)
class FederationConfig:
    clients: int | None = key(
        None,
        "number of clients (one per 100 examples up to 200; natural: as many as the data name)",
        at_least=1,
        optional=200,
    )
    cohort: int | None = key(None, "expected clients a round (10, or all if there are fewer)", at_least=1, optional=10)
    rounds: int = key(20, "communication rounds", at_least=1, at_most=1_000_000)
    seed: int = key(
        0,
        "seed of the partition, the cohorts and the training",
        at_least=0,
        at_most=2**32 - 1,
    )
    sampling: str = key(
        "auto",
        "fixed: cohorts of exactly that size; poisson: each client by its own coin; schedule: clients in turn by a public "
        "order; auto: schedule where clients are protected",
        choices=("auto", "fixed", "poisson", "schedule"),
    )
    weighting: str = key(
        "uniform", "a client's weight in the mean: one, or its example count", choices=("uniform", "examples")
    )
    nonfinite: str = key(
        "skip", "a client sends NaN or infinity: leave it out, or fail the run", choices=("skip", "fail")
    )
    aggregate: str = key(
        "mean",
        "how the server combines a round's changes; trimmed_mean and median, coordinate by coordinate, withstand some clients "
        "that send arbitrary values",
        choices=("mean", "trimmed_mean", "median"),
    )
    trim: float = key(0.2, "share of the changes that trimmed_mean leaves out at either end", above=0.0, below=0.5)
    server_optimizer: str = key(
        "auto",
        "how the mean change is applied (FedOpt); auto: momentum where clients are protected and no setting excludes it, "
        "else mean",
        choices=("auto", "mean", "momentum", "adam"),
    )
    server_lr: float | None = key(
        None,
        "server learning rate (1; 0.01 with adam; fitted to the noise where clients are protected and train by adamw)",
        above=0.0,
        optional=1.0,
    )
    server_momentum: float | None = key(
        None,
        "server momentum, Adam's beta 1 (0.9; 0.5 where auto chooses momentum)",
        at_least=0.0,
        below=1.0,
        optional=0.9,
    )
    average_last: int | None = key(
        None,
        "last rounds whose models are averaged into the final model (1; a quarter of the rounds where clients are "
        "protected and train by adamw, unless the run may end early)",
        at_least=1,
        optional=1,
    )
    largest_value: float = key(
        1000.0,
        "largest magnitude of tensors that a client starts from; larger ones mean a diverged model or a lying server",
        above=0.0,
    )
    vanishing: float = key(
        0.0,
        "simulated dropout: share of a cohort (of all clients where privacy hides cohorts) that vanishes in the middle of "
        "every round",
        at_least=0.0,
        below=1.0,
    )

    @property
    def optimizer(self) -> str:
        """The server's optimiser, with its default if it is not set."""
        return "mean" if self.server_optimizer == "auto" else self.server_optimizer

    @property
    def server_rate(self) -> float:
        """The server's learning rate, with its default if it is not set. An Adam step moves each weight by about this much."""
        usual = 0.01 if self.server_optimizer == "adam" else 1.0
        return usual if self.server_lr is None else self.server_lr

    @property
    def server_beta(self) -> float:
        """The server's momentum, with its default if it is not set."""
        return 0.9 if self.server_momentum is None else self.server_momentum

    @property
    def averaged(self) -> int:
        """The number of last models that the final model averages, with its default if it is not set."""
        return 1 if self.average_last is None else self.average_last

    @property
    def momentum(self) -> float:
        """The momentum with which the server accumulates round means; 0 if it applies means directly, and with Adam."""
        return self.server_beta if self.server_optimizer == "momentum" else 0.0
