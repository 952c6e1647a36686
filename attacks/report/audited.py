"""An audit in typed values, for display: its attacks, its vantage points, and each cell's finding."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attacks.report.values import Interval, Row

NO_UNIT = "none"


@dataclass(frozen=True)
class Tail:
    """The true-positive rate at a false-positive rate of at most `target`. tpr: None if there were too few non-members."""

    target: float
    tpr: float | None
    tpr_interval: Interval | None
    fpr: float | None
    fpr_interval: Interval | None


@dataclass(frozen=True)
class Estimated:
    """An estimate: its kind, a 95 % lower limit of epsilon if its assumption holds, and the most likely epsilon."""

    name: str
    epsilon: float
    point: float | None


@dataclass(frozen=True)
class Allowed:
    """The figures that a kept guarantee allows an attack. by: "mechanism" if from the curve of its noise, else "epsilon"."""

    auc: float
    rates: Mapping[float, float]
    by: str


@dataclass(frozen=True)
class Cell:
    """One attack at one vantage point. interval: of the AUC by itself, at 95 %. lower: the lower bound on epsilon; accounted:
    the epsilon to compare it with, None without a guarantee against this adversary. null: "known" if members were compared with
    a known law. estimates: of epsilon, not bounds. allowed: the figures that the guarantee allows an attack, if computed.
    """

    attack: str
    vantage: str
    applicable: bool
    why: str
    auc: float | None
    interval: Interval | None
    tails: tuple[Tail, ...]
    lower: float | None
    how: str
    accounted: float | None
    members: int | None
    non_members: int | None
    measured: Row
    note: str
    seconds: float | None
    showable: float | None = None
    null: str = ""
    estimates: tuple[Estimated, ...] = ()
    allowed: Allowed | None = None

    @property
    def known(self) -> bool:
        """Whether the law of a non-member's score was known, so that AUC and rates use no held-out units."""
        return self.null == "known"

    @property
    def of_membership(self) -> bool:
        """Whether the attack ranked units by how likely they are members."""
        return self.applicable and self.auc is not None

    def tail(self, target: float) -> Tail | None:
        """The true-positive rate at that false-positive rate, if it was measured."""
        return next((tail for tail in self.tails if math.isclose(tail.target, target) and tail.tpr is not None), None)


@dataclass(frozen=True)
class Named:
    """A vantage point or an attack. about: the vantage point's view, or the attack's paper."""

    name: str
    title: str
    about: str


@dataclass(frozen=True)
class Baseline:
    """A guess from the texts alone. at_chance: None if it was not tested, for the reason `why`."""

    auc: float | None
    interval: Interval | None
    at_chance: bool | None
    why: str


@dataclass(frozen=True)
class Audit:
    """One audit. unit: the unit of the guarantee, "none" without one; audited: the unit that coins included or held out.
    epsilon: the epsilon to compare findings with; promised: the run's epsilon, for an `adjacency` that coins may be unable to
    test. asked_for: the requested attacks by name, empty if all; personal: tensors that stay with clients. main: attack and
    vantage of the main attack. phantoms: whether the units are phantoms, which are nobody's data. expected: the lower bound
    expected from the best attack.
    """

    run: str
    method: str
    unit: str
    audited: str
    epsilon: float | None
    delta: float | None
    accuracy: float | None
    members: int | None
    non_members: int | None
    significance: float
    baseline: Baseline
    vantages: tuple[Named, ...]
    attacks: tuple[Named, ...]
    cells: tuple[Cell, ...]
    roc: Mapping[str, Row]
    clients: tuple[Row, ...]
    exposed: tuple[Row, ...]
    sweep: tuple[Row, ...]
    verdict: Row
    canaries: str = "none"
    promised: float | None = None
    adjacency: str = ""
    asked_for: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    main: tuple[str, str] | None = None
    accusations: tuple[Row, ...] = ()
    phantoms: bool = False
    expected: float | None = None

    @property
    def main_cell(self) -> Cell | None:
        """The cell of the main attack, which was chosen before scores were seen; None for an audit without one."""
        return next((cell for cell in self.of_membership if (cell.attack, cell.vantage) == self.main), None)

    @property
    def protected(self) -> bool:
        """Whether the run has a guarantee with an epsilon."""
        return self.unit != NO_UNIT and self.epsilon is not None

    @property
    def comparable(self) -> bool:
        """Whether the guarantee is for the audited unit."""
        return self.protected and self.unit == self.audited

    @property
    def of_membership(self) -> tuple[Cell, ...]:
        """The cells of attacks that ranked units."""
        return tuple(cell for cell in self.cells if cell.of_membership)

    @property
    def results(self) -> tuple[Cell, ...]:
        """The cells of attacks that ranked units; an attack's equal figures for several adversaries count once."""
        found: dict[object, Cell] = {}
        for cell in sorted(self.of_membership, key=lambda cell: self.rank(cell.vantage)):
            found.setdefault((cell.attack, cell.auc, cell.interval, cell.tails, cell.lower), cell)
        return tuple(found.values())

    @property
    def bounded(self) -> tuple[Cell, ...]:
        """The cells with a lower bound on epsilon: first those that the guarantee covers, then by size, largest first."""
        found = [cell for cell in self.cells if cell.lower is not None]
        return tuple(sorted(found, key=lambda cell: (not self.covers(cell), -(cell.lower or 0.0))))

    def covers(self, cell: Cell) -> bool:
        """Whether the guarantee is for the audited unit and against this adversary."""
        return self.comparable and cell.accounted is not None

    def cell(self, attack: str, vantage: str) -> Cell | None:
        """The cell of that attack and vantage point; None if it was not tried."""
        return next((cell for cell in self.cells if (cell.attack, cell.vantage) == (attack, vantage)), None)

    def rank(self, vantage: str) -> int:
        """A vantage point's place, from the weakest on; an unknown one comes last."""
        return next((place for place, known in enumerate(self.vantages) if known.name == vantage), len(self.vantages))

    def attack_title(self, name: str) -> str:
        """An attack's name for display."""
        return next((attack.title for attack in self.attacks if attack.name == name), name)

    def vantage_title(self, name: str) -> str:
        """A vantage point's name for display."""
        return next((vantage.title for vantage in self.vantages if vantage.name == name), name)
