"""The record of a run's audit, as audit.json holds it: its content, how it is written and how it is read.

Fields have the names and the order of the file. `content` writes every audit, and `read` reads every one: the page, the
terminal, the notebook and the comparison of runs get an `Audit`. A file that lacks a field, or has a value of another kind, is
damaged or of another version; reading it ends with one sentence that names the value. Texts in an audit come from data and
from users, so a page escapes them (`secure_fed.report.markup`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cached_property
from itertools import repeat
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from secure_fed.errors import RunDirectoryError

Interval = tuple[float, float]
Level = Literal["none_found", "within", "leak", "violation", "unsupported"]
NO_UNIT = "none"
SCHEMA = 1


@dataclass(frozen=True)
class AttackAt:
    """An attack, at a vantage point."""

    attack: str
    vantage: str


@dataclass(frozen=True)
class Vantage:
    """A vantage point. sees: the adversary's observations, in words."""

    name: str
    title: str
    sees: str


@dataclass(frozen=True)
class AttackTitle:
    """An attack, and the paper it comes from."""

    name: str
    title: str
    paper: str


@dataclass(frozen=True)
class Rates:
    """A true-positive rate and the false-positive rate it was measured at, each with its 95 % interval."""

    tpr: float
    tpr_interval: Interval
    fpr: float
    fpr_interval: Interval


@dataclass(frozen=True)
class Tail:
    """The true-positive rate at a false-positive rate of at most `target`; None if there were too few non-members."""

    target: float
    tpr: float | None = None
    tpr_interval: Interval | None = None
    fpr: float | None = None
    fpr_interval: Interval | None = None


@dataclass(frozen=True)
class Estimate:
    """An estimate of epsilon, named after its assumption (`evidence.figures.estimates`). It proves nothing.

    epsilon: a 95 % lower limit, if the assumption holds; point: the most likely epsilon.
    """

    name: str
    epsilon: float
    point: float | None = None


@dataclass(frozen=True)
class Allowed:
    """The figures that a kept guarantee allows an attack. by: "mechanism" if from the curve of its noise, else "epsilon"."""

    auc: float
    tpr_at_fpr: Mapping[float, float]
    by: str


@dataclass(frozen=True)
class Cell:
    """One attack at one vantage point. Figures that it does not have are None.

    applicable: whether the attack was made; why: the reason why not. auc_interval: of the AUC by itself, at 95 %. tpr_at_fpr:
    by false-positive rate; None where there were too few non-members. epsilon_lower: the lower bound on epsilon;
    epsilon_showable: the largest bound that so many units can show; epsilon_accounted: the epsilon to compare it with, None
    without a guarantee against this adversary; epsilon_how: the bound in words. allowed: what the guarantee allows an attack,
    if it covers this one. measured: the attack's own numbers, by any name. null: "known" if members were compared with the
    known law of a non-member's score.
    """

    attack: str
    vantage: str
    applicable: bool
    why: str
    auc: float | None = None
    auc_interval: Interval | None = None
    members: int | None = None
    non_members: int | None = None
    tpr_at_fpr: Mapping[float, Rates | None] | None = None
    epsilon_lower: float | None = None
    epsilon_showable: float | None = None
    epsilon_accounted: float | None = None
    allowed: Allowed | None = None
    seconds: float | None = None
    epsilon_how: str = ""
    measured: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    null: str = ""
    estimates: tuple[Estimate, ...] = ()

    @cached_property
    def tails(self) -> tuple[Tail, ...]:
        """The true-positive rates, from the largest false-positive rate on."""
        found = [Tail(at) if one is None else Tail(at, **vars(one)) for at, one in (self.tpr_at_fpr or {}).items()]
        return tuple(sorted(found, key=lambda tail: -tail.target))

    def tail(self, target: float) -> Tail | None:
        """The true-positive rate at that false-positive rate, if it was measured."""
        return next((tail for tail in self.tails if math.isclose(tail.target, target) and tail.tpr is not None), None)

    @property
    def known(self) -> bool:
        """Whether the law of a non-member's score was known, so that AUC and rates use no held-out units."""
        return self.null == "known"

    @property
    def of_membership(self) -> bool:
        """Whether the attack ranked units by how likely they are members."""
        return self.applicable and self.auc is not None


@dataclass(frozen=True)
class Curve:
    """An empirical ROC curve: equally long lists of rising rates; low and high are empty without a band."""

    fpr: tuple[float, ...]
    tpr: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """A guess from the texts alone. at_chance: None if it was not tested, for the reason `why`."""

    auc: float | None
    auc_interval: Interval | None
    at_chance: bool | None
    why: str


@dataclass(frozen=True)
class Client:
    """A client whose members score high. score: the mean share of held-out units below its members; score_held_out: the same
    for its held-out units, None without any.
    """

    client: str
    units: int
    score: float
    held_out: int
    score_held_out: float | None


@dataclass(frozen=True)
class Exposed:
    """A unit with a high score. score: None if infinite; share_below: of held-out units; text: None unless requested."""

    unit: str
    client: str
    score: float | None
    share_below: float
    rank: int
    member: bool
    text: str | None


@dataclass(frozen=True)
class Accusation:
    """The number of held-out units among the first ones."""

    first: int
    false: int


@dataclass(frozen=True)
class Expected:
    """The lower bound expected from the best possible attack. by: the mechanism it was computed for."""

    epsilon_lower: float
    by: str


@dataclass(frozen=True)
class RunBeside:
    """A run beside others (`report.sweep`). of: its data, method, audited unit and canaries. attack, vantage, auc and rates
    are the main attack's; delta is the delta of the lower bound.
    """

    run_dir: str
    label: str
    epsilon: float | None
    delta: float
    accuracy: float | None
    of: Mapping[str, str]
    attack: str | None = None
    vantage: str | None = None
    auc: float | None = None
    auc_interval: Interval | None = None
    tpr_at_1: Tail | None = None
    tpr_at_01: Tail | None = None
    epsilon_lower: float | None = None
    epsilon_lower_attack: str | None = None
    epsilon_lower_vantage: str | None = None


@dataclass(frozen=True)
class Verdict:
    """The verdict (`evidence.verdict`): its level, all sentences, and those that come first."""

    level: Level
    text: str
    summary: str


@dataclass(frozen=True)
class Audit:
    """One audit. The fields without a line of their own are the run's.

    unit: the unit of the guarantee, "none" without one; audited_unit: the unit that coins included or held out; audited_of:
    "dummies" if these units are nobody's data. recorded: what the run recorded (`evaluation.record`). references: the number
    of reference adapters. epsilon_promised: the run's epsilon, for an `adjacency` that coins may be unable to test;
    epsilon_accounted: the epsilon to compare findings with. personal: tensors that stay with clients. main: the main attack.
    asked_for: the attacks requested by name, empty if all. roc: by attack/vantage. clients, exposed, accusations: what the
    main attack ranks highest. expected: None without a guarantee of the main attack's unit. sweep: runs beside each other.
    """

    schema: int
    run_dir: str | None
    method: str | None
    model: str | None
    data: str | None
    unit: str | None
    delta: float | None
    accuracy: float | None
    audited_unit: str
    audited_of: str
    canaries: str
    recorded: str
    rounds: int
    references: int
    epsilon_promised: float | None
    adjacency: str | None
    personal: tuple[str, ...]
    epsilon_accounted: float | None
    members: int
    non_members: int
    significance: float
    vantages: tuple[Vantage, ...]
    main: AttackAt | None
    asked_for: tuple[str, ...]
    attacks: tuple[AttackTitle, ...]
    cells: tuple[Cell, ...]
    roc: Mapping[str, Curve]
    baseline: Baseline
    clients: tuple[Client, ...]
    exposed: tuple[Exposed, ...]
    accusations: tuple[Accusation, ...]
    expected: Expected | None
    sweep: tuple[RunBeside, ...]
    verdict: Verdict

    @property
    def dummies(self) -> bool:
        """Whether the audited units are dummies, which are nobody's data."""
        return self.audited_of == "dummies"

    @cached_property
    def main_cell(self) -> Cell | None:
        """The cell of the main attack, which was chosen before scores were seen; None for an audit without one."""
        return next((cell for cell in self.of_membership if AttackAt(cell.attack, cell.vantage) == self.main), None)

    @property
    def guaranteed(self) -> bool:
        """Whether the run has a guarantee, whatever its epsilon."""
        return self.unit not in (None, NO_UNIT)

    @property
    def protected(self) -> bool:
        """Whether the run has a guarantee with an epsilon."""
        return self.guaranteed and self.epsilon_accounted is not None

    @property
    def comparable(self) -> bool:
        """Whether the guarantee is for the audited unit."""
        return self.protected and self.unit == self.audited_unit

    @property
    def of_membership(self) -> tuple[Cell, ...]:
        """The cells of attacks that ranked units."""
        return tuple(cell for cell in self.cells if cell.of_membership)

    @cached_property
    def results(self) -> tuple[Cell, ...]:
        """The cells of attacks that ranked units; an attack's equal figures for several adversaries count once."""
        found: dict[object, Cell] = {}
        for cell in sorted(self.of_membership, key=lambda cell: self.rank(cell.vantage)):
            found.setdefault((cell.attack, cell.auc, cell.auc_interval, cell.tails, cell.epsilon_lower), cell)
        return tuple(found.values())

    @property
    def bounded(self) -> tuple[Cell, ...]:
        """The cells with a lower bound on epsilon: first those that the guarantee covers, then by size, largest first."""
        found = [cell for cell in self.cells if cell.epsilon_lower is not None]
        return tuple(sorted(found, key=lambda cell: (not self.covers(cell), -(cell.epsilon_lower or 0.0))))

    @property
    def lower(self) -> float | None:
        """The largest lower bound, over the adversaries that the guarantee covers, or over all if it covers none."""
        return next((cell.epsilon_lower for cell in self.bounded), None)

    def covers(self, cell: Cell) -> bool:
        """Whether the guarantee is for the audited unit and against this adversary."""
        return self.comparable and cell.epsilon_accounted is not None

    def cell(self, attack: str, vantage: str) -> Cell | None:
        """The cell of that attack and vantage point; None if it was not tried."""
        return next((cell for cell in self.cells if (cell.attack, cell.vantage) == (attack, vantage)), None)

    def applies_nowhere(self, attack: str) -> bool:
        """Whether no adversary could make the attack."""
        cells = [self.cell(attack, vantage.name) for vantage in self.vantages]
        return all(cell is not None and not cell.applicable for cell in cells)

    def rank(self, vantage: str) -> int:
        """A vantage point's place, from the weakest on; an unknown one comes last."""
        return next((place for place, known in enumerate(self.vantages) if known.name == vantage), len(self.vantages))

    def attack_title(self, name: str) -> str:
        """An attack's name for display."""
        return next((attack.title for attack in self.attacks if attack.name == name), name)

    def vantage_title(self, name: str) -> str:
        """A vantage point's name for display."""
        return next((vantage.title for vantage in self.vantages if vantage.name == name), name)


def content(audit: Audit) -> dict[str, Any]:
    """The content of audit.json, with null for infinite numbers and NaN."""
    found: dict[str, Any] = _plain(asdict(audit))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{name:g}" if isinstance(name, float) else name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read(found: Mapping[str, Any], where: str = "audit.json") -> Audit:
    """The audit in the content of a file. RunDirectoryError, naming the file, if a value is missing or of another kind."""
    try:
        audit: Audit = _read(Audit, found, "it")
    except (ValueError, OverflowError) as error:
        raise RunDirectoryError(f"{where} is damaged, or of another version ({error}): audit the run again") from error
    return audit


def _read(kind: Any, value: Any, name: str) -> Any:
    """The value as the type that a field has. ValueError for another one."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Literal and value in inner:
        return value
    if origin is UnionType:
        return None if value is None else _read(inner[0], value, name)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, Mapping):
        types, missing = get_type_hints(kind), [one.name for one in fields(kind) if one.name not in value]
        if missing:
            raise ValueError(f"{name} has no {missing[0]}")
        return kind(**{one.name: _read(types[one.name], value[one.name], one.name) for one in fields(kind)})
    if origin is tuple and isinstance(value, list | tuple):
        kinds = repeat(inner[0], len(value)) if inner[-1] is Ellipsis else inner
        return tuple(_read(one, each, name) for one, each in zip(kinds, value, strict=True))
    if origin is Mapping and isinstance(value, Mapping):
        return {inner[0](key): _read(inner[1], one, str(key)) for key, one in value.items()}
    if kind is float:
        if type(value) in (int, float) and math.isfinite(value):
            return float(value)
    elif type(value) is kind:
        return value
    raise ValueError(f"{name} is {value!r:.40}")
