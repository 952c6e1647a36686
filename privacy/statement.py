"""The guarantee of a run, in words and as data, with its assumptions and the limits of its coverage."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from decimal import ROUND_CEILING, Context
from typing import Any, Literal

NOT_COVERED = (
    "the choice of hyper-parameters, data and rounds by looking at private results",
    "evaluations on test data that are themselves private",
    "what the timing, message sizes and failures of single machines reveal, and errors that depend on private data: the exit "
    "status shows them",
    "the set of labels, and the names and number of the clients, which are public",
    "facts about many units together, such as all clients of one region",
)


Observer = Literal["reader", "participant", "server"]
READER: tuple[Observer, ...] = ("reader",)
CLIENTS: tuple[Observer, ...] = ("reader", "participant")
EVERYBODY: tuple[Observer, ...] = ("reader", "participant", "server")


@dataclass(frozen=True)
class Statement:
    """A differential-privacy guarantee.

    holds_against: the observers that epsilon holds against (`OBSERVERS`): whoever gets the final model, or that of any round
    ("reader"); the other clients, who also see who takes part, and when ("participant"); the server, which sees everything sent
    to it. epsilon_participants: epsilon against an observer who sees who takes part; it equals epsilon where epsilon holds
    against the other clients. With noise that the server adds, neither holds against the server. private: False if noise or
    coins were seeded or injected, which voids the whole guarantee.
    """

    unit: str
    adjacency: str
    epsilon: float
    epsilon_participants: float
    delta: float
    mechanism: str
    sampling: str
    accountant: str
    noise: str
    trust: str
    released: str
    holds_against: tuple[Observer, ...] = READER
    not_covered: tuple[str, ...] = NOT_COVERED
    private: bool = True

    @property
    def headline(self) -> str:
        """The guarantee and its unit. The numbers are rounded up, so that the text never promises more than the data."""
        verdict = (
            ""
            if self.private
            else "NOT PRIVATE: noise or sampling coins were seeded or injected, so none of this holds. "
        )
        return (
            f"{verdict}({rounded_up(self.epsilon, 4)}, {rounded_up(self.delta, 3)})-differential privacy against "
            f"{_AGAINST[self.holds_against]}. Unit: {self.unit}."
        )

    @property
    def text(self) -> str:
        """One paragraph, which begins with the headline."""
        return (
            f"{self.headline} Neighbouring data sets: {self.adjacency}. {_TOGETHER} {self._participants}"
            f"Mechanism: {self.mechanism}. Sampling: {self.sampling}. Accountant: {self.accountant}. "
            f"Noise is added {self.noise}. Trust: {self.trust}. Released: {self.released}. "
            f"Not covered: {'; '.join(self.not_covered)}."
        )

    @property
    def _participants(self) -> str:
        """The second epsilon, where the first does not hold against the other clients."""
        if "participant" in self.holds_against:
            return ""
        whose = SEES_COHORTS if "client" in self.unit else _SEES_BATCHES
        return f"Against {whose}, epsilon is {rounded_up(self.epsilon_participants, 4)}. "

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"not_covered": list(self.not_covered), "holds_against": list(self.holds_against)}


PROSE = frozenset(
    ("unit", "adjacency", "mechanism", "sampling", "accountant", "noise", "trust", "released", "not_covered", "text")
)  # keys whose values are sentences: they follow from the settings and from the other keys, and versions word them differently
OBSERVERS: dict[Observer, str] = {
    "reader": "whoever gets the final model",
    "participant": "the other clients",
    "server": "the server",
}
_TOGETHER = "Several units of one person are protected less together."
SEES_COHORTS = (
    "whoever sees which clients take part in a round, such as the other clients of that round, or somebody who watches the "
    "network"
)
_SEES_BATCHES = "whoever sees which examples each step draws, such as somebody with access to the machine that trains"
_AGAINST: dict[tuple[Observer, ...], str] = {
    READER: "whoever gets the final model, or the model of any round",
    CLIENTS: "whoever gets the final model, and the other clients, who see when each client takes part; not against the server",
    EVERYBODY: "whoever gets the final model, the other clients, who see when each client takes part, and the server",
}


def rounded_up(value: float, digits: int) -> str:
    """The value rounded up to `digits` digits, starting from its shortest decimal form: 0.1 stays 0.1."""
    return f"{float(Context(prec=digits, rounding=ROUND_CEILING).create_decimal(repr(float(value)))):.{digits}g}"
