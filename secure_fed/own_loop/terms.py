"""The privacy budget of a user's own training loop, and the steps and noise that follow from it."""

from __future__ import annotations

from dataclasses import dataclass

from privacy.plan import Plan, Target, for_gradients
from privacy.sampling import Poisson
from secure_fed.errors import ConfigError


@dataclass(frozen=True)
class Budget:
    """The privacy that a loop may spend, at the example unit.

    epsilon, delta: the target of all steps together; delta well below one over the number of examples. epochs or steps: how
    long the loop trains; an epoch has ceil(examples / batch size) steps. clip_norm: the L2 norm that an example's gradient is
    scaled down to.
    """

    epsilon: float
    delta: float
    epochs: int | None = None
    steps: int | None = None
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name, value in (("epsilon", self.epsilon), ("clip_norm", self.clip_norm)):
            if not _number(value) or not 0 < value < float("inf"):
                raise ConfigError(f"{name} is {value!r}; it must be a finite number above 0").about(
                    name, value, "above 0"
                )
        if not _number(self.delta):
            raise ConfigError(f"delta is {self.delta!r}; it must be a number").about("delta", self.delta, "a number")
        if (self.epochs is None) == (self.steps is None):
            both = (self.epochs, self.steps)
            raise ConfigError(f"epochs and steps are {both}; give one of them").about("epochs", both, "one of two")
        for name, count in (("epochs", self.epochs), ("steps", self.steps)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ConfigError(f"{name} is {count!r}; it must be a whole number from 1 on").about(
                    name, count, "from 1"
                )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True)
class Terms:
    """The steps of a loop over `examples` examples, each of which a step draws with probability min(1, batch_size / examples).

    epochs or steps: one of them; an epoch has ceil(examples / batch_size) steps.
    """

    examples: int
    batch_size: int
    delta: float
    epochs: int | None = None
    steps: int | None = None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            both = (self.epochs, self.steps)
            raise ConfigError(f"epochs and steps are {both}; give one of them").about("epochs", both, "one of two")
        for name in ("examples", "batch_size", "epochs", "steps"):
            count = getattr(self, name)
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ConfigError(f"{name} is {count!r}; it must be a whole number from 1 on").about(
                    name, count, "from 1"
                )
        if not 0 < self.delta * self.examples < 1:
            least = f"{1 / self.examples:g}"
            raise ConfigError(f"delta is {self.delta:g}; choose it above 0 and well below 1/examples = {least}").about(
                "delta", self.delta, f"below {least}"
            )

    @classmethod
    def of(cls, budget: Budget, examples: int, batch_size: int) -> Terms:
        return cls(examples, batch_size, budget.delta, budget.epochs, budget.steps)

    @property
    def sampler(self) -> Poisson:
        return Poisson(self.examples, min(1.0, self.batch_size / self.examples))

    @property
    def epoch(self) -> int:
        """The steps of one epoch."""
        return -(-self.examples // self.batch_size)

    @property
    def count(self) -> int:
        """The steps of the whole loop."""
        return self.steps if self.steps is not None else self.epoch * (self.epochs or 0)

    def plan(self, epsilon: float | None, noise_multiplier: float | None = None) -> Plan:
        """The noise and cost of all steps, planned as the private training of one client that is named ""."""
        return for_gradients(Target(epsilon, noise_multiplier, self.delta), [""], [self.sampler], [self.count], 1)
