"""An audit as people are shown it, in typed values: its attacks, vantage points, and what each cell found."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attacks.report.values import Interval, Row

NO_UNIT = "none"


@dataclass(frozen=True)
class Tail:
    """The true-positive rate where at most `target` of the non-members are accused; `tpr` is None where it was refused."""

    target: float
    tpr: float | None
    tpr_interval: Interval | None
    fpr: float | None
    fpr_interval: Interval | None


@dataclass(frozen=True)
class Estimated:
    """An estimate: its kind, the end that epsilon is above with 95 % if what it supposes holds, and the likeliest epsilon."""

    name: str
    epsilon: float
    point: float | None


@dataclass(frozen=True)
class Allowed:
    """The figures that a kept guarantee allows an attack. by: "mechanism" of the curve of its noise, else "epsilon"."""

    auc: float
    rates: Mapping[float, float]
    by: str


@dataclass(frozen=True)
class Cell:
    """One attack at one vantage point. interval: of the AUC by itself, at 95 %. lower: the lower bound on epsilon; accounted:
    what it is to be set against, None where nothing is promised against this adversary. null: "known" where members were held
    against a known law. estimates: of epsilon, no bounds. allowed: what the guarantee lets an attack find, where it was worked
    out.
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
        """Whether the law of a non-member's score was known, so that no held-out unit has a part in AUC and rates."""
        return self.null == "known"

    @property
    def of_membership(self) -> bool:
        """Whether the attack ranked units by how likely they are members."""
        return self.applicable and self.auc is not None

    def tail(self, target: float) -> Tail | None:
        """The rate at that false-positive rate, where it was measured."""
        return next((tail for tail in self.tails if math.isclose(tail.target, target) and tail.tpr is not None), None)


@dataclass(frozen=True)
class Named:
    """A vantage point or an attack. about: what it sees, or the paper it is of."""

    name: str
    title: str
    about: str


@dataclass(frozen=True)
class Baseline:
    """A guess from the texts alone. at_chance: None where nobody looked, for the reason `why`."""

    auc: float | None
    interval: Interval | None
    at_chance: bool | None
    why: str


@dataclass(frozen=True)
class Audit:
    """One audit. unit: whom the guarantee protects, "none" without one; audited: what was in or out by a coin. epsilon: what
    findings can be set against; promised: that of the run, of an `adjacency` that coins may be unable to ask about. asked_for:
    attacks by name, empty if all; personal: tensors that stay with clients. main: attack and vantage of the main one. phantoms:
    whether the units are phantoms, which are nobody's data. expected: the lower bound that the best attack would show.
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
        """The cell of the main attack, which was named before scores were seen; None of an audit that names none."""
        return next((cell for cell in self.of_membership if (cell.attack, cell.vantage) == self.main), None)

    @property
    def protected(self) -> bool:
        """Whether there is an epsilon that the run promised to keep to."""
        return self.unit != NO_UNIT and self.epsilon is not None

    @property
    def comparable(self) -> bool:
        """Whether the guarantee is for the unit that was audited."""
        return self.protected and self.unit == self.audited

    @property
    def of_membership(self) -> tuple[Cell, ...]:
        """The cells that ranked units."""
        return tuple(cell for cell in self.cells if cell.of_membership)

    @property
    def results(self) -> tuple[Cell, ...]:
        """The cells that ranked units; an attack with equal figures for several adversaries counts for the weakest alone."""
        found: dict[object, Cell] = {}
        for cell in sorted(self.of_membership, key=lambda cell: self.rank(cell.vantage)):
            found.setdefault((cell.attack, cell.auc, cell.interval, cell.tails, cell.lower), cell)
        return tuple(found.values())

    @property
    def bounded(self) -> tuple[Cell, ...]:
        """The cells with a lower bound on epsilon, largest first, those that the guarantee covers before all others."""
        found = [cell for cell in self.cells if cell.lower is not None]
        return tuple(sorted(found, key=lambda cell: (not self.covers(cell), -(cell.lower or 0.0))))

    def covers(self, cell: Cell) -> bool:
        """Whether the guarantee is for the unit that was audited, and against this adversary."""
        return self.comparable and cell.accounted is not None

    def cell(self, attack: str, vantage: str) -> Cell | None:
        """The cell of that attack and vantage point; None where it was not tried."""
        return next((cell for cell in self.cells if (cell.attack, cell.vantage) == (attack, vantage)), None)

    def rank(self, vantage: str) -> int:
        """A vantage point's place from the weakest on; one that is not known comes last."""
        return next((place for place, known in enumerate(self.vantages) if known.name == vantage), len(self.vantages))

    def attack_title(self, name: str) -> str:
        """An attack's name as people read it."""
        return next((attack.title for attack in self.attacks if attack.name == name), name)

    def vantage_title(self, name: str) -> str:
        """A vantage point's name as people read it."""
        return next((vantage.title for vantage in self.vantages if vantage.name == name), name)
