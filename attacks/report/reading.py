"""audit.json as typed values. Missing and invalid values are None or empty.

An audit may be old, cut short or edited by hand, and its reader should still see the rest. So nothing here raises, and no
number is made up: an unreadable value, or one of the wrong type, is missing, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from attacks.evidence.attempts import Attempt, Grade, best, exact, guessed, matched

Interval = tuple[float, float]
Row = Mapping[str, Any]
NO_UNIT = "none"
LARGEST = 1e12  # no figure of an audit is near it; a larger number may not fit into a float or onto a page


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
    vantages: tuple[Titled, ...]
    attacks: tuple[Titled, ...]
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

    @property
    def lower(self) -> float | None:
        """The largest lower bound, over the adversaries that the guarantee covers, or over all if it covers none."""
        return next((cell.lower for cell in self.bounded), None)

    def covers(self, cell: Cell) -> bool:
        """Whether the guarantee is for the audited unit and against this adversary."""
        return self.comparable and cell.accounted is not None

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

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        """Every attempt of an attack on texts that has a number (`attacks.evidence.attempts`)."""
        if self.of_membership:
            return ()
        found = []
        for figures, together in ((self.measured, False), (row(self.measured.get("all_rounds")), True)):
            looked, applied = count(figures.get("updates")), count(figures.get("exact_applicable"))
            most = row(figures.get("most_exposed"))
            found.append(Attempt("exact", exact(figures), exact(most) if most else None, together, looked, applied))
            most = row(figures.get("most_exposed_guess"))
            found.append(Attempt("guessed", guessed(figures), guessed(most) if most else None, together, looked))
        optimised = row(self.measured.get("matching"))
        found.append(Attempt("matched", matched(optimised), looked=count(optimised.get("updates"))))
        return tuple(one for one in found if one.mean.most is not None)

    @property
    def grade(self) -> Grade | None:
        """The grade of the best attempt to recover texts; None for an attack that is not on texts."""
        found = best(self.attempts)
        return None if found is None else found.grade

    def tail(self, target: float) -> Tail | None:
        """The true-positive rate at that false-positive rate, if it was measured."""
        return next((tail for tail in self.tails if math.isclose(tail.target, target) and tail.tpr is not None), None)


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
class Titled:
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


def read(audit: Mapping[str, Any]) -> Audit:
    """The audit as typed values, as far as it can be read."""
    fields = row(audit)
    main = row(fields.get("main"))
    main_attack, main_vantage = words(main.get("attack")), words(main.get("vantage"))
    unit = words(fields.get("unit")) or NO_UNIT
    return Audit(
        run=words(fields.get("run_dir")),
        method=words(fields.get("method")),
        unit=unit,
        audited=words(fields.get("audited_unit")) or ("example" if unit == NO_UNIT else unit),
        epsilon=number(fields.get("epsilon_accounted")),
        delta=number(fields.get("delta")),
        accuracy=number(fields.get("accuracy")),
        members=count(fields.get("members")),
        non_members=count(fields.get("non_members")),
        significance=share(fields.get("significance"), 0.05),
        baseline=_baseline(row(fields.get("baseline"))),
        vantages=_named(fields, "vantages", "vantage", "sees"),
        attacks=_named(fields, "attacks", "attack", "paper"),
        cells=tuple(_cell(one, fields) for one in rows(fields.get("cells"))),
        roc={words(name): row(curve) for name, curve in row(fields.get("roc")).items()},
        clients=rows(fields.get("clients")),
        exposed=rows(fields.get("exposed")),
        sweep=rows(fields.get("sweep")),
        verdict=row(fields.get("verdict")),
        canaries=words(fields.get("canaries")) or "none",
        promised=number(fields.get("epsilon_promised")),
        adjacency=words(fields.get("adjacency")),
        asked_for=_names(fields.get("asked_for")),
        personal=_names(fields.get("personal")),
        main=(main_attack, main_vantage) if main_attack and main_vantage else None,
        accusations=rows(fields.get("accusations")),
        expected=number(row(fields.get("expected")).get("epsilon_lower")),
        phantoms=words(fields.get("audited_of")) == "phantoms",
    )


def _cell(one: Row, fields: Row) -> Cell:
    applicable = one.get("applicable") is not False
    estimates = (
        (words(each.get("name")), number(each.get("epsilon")), number(each.get("point")))
        for each in (rows(one.get("estimates")) if applicable else ())
    )
    return Cell(
        attack=words(one.get("attack")),
        vantage=words(one.get("vantage")),
        applicable=applicable,
        why=words(one.get("why")),
        auc=number(one.get("auc")) if applicable else None,
        interval=interval(one.get("auc_interval")) if applicable else None,
        tails=_tails(row(one.get("tpr_at_fpr"))) if applicable else (),
        lower=number(one.get("epsilon_lower")) if applicable else None,
        how=words(one.get("epsilon_how")),
        accounted=_accounted(one, fields),
        members=_own(one, fields, "members"),
        non_members=_own(one, fields, "non_members"),
        measured=row(one.get("measured")) if applicable else {},
        note=words(one.get("note")),
        seconds=number(one.get("seconds")),
        showable=number(one.get("epsilon_showable")) if applicable else None,
        null=words(one.get("null")),
        estimates=tuple(Estimated(name, low, point) for name, low, point in estimates if name and low is not None),
        allowed=_allowed(row(one.get("allowed"))),
    )


def _accounted(one: Row, fields: Row) -> float | None:
    """The epsilon that holds against this adversary, None without one: the cell's, else its vantage point's, else the run's."""
    at = next((seen for seen in rows(fields.get("vantages")) if seen.get("name") == one.get("vantage")), {})
    for place in (one, at):
        if "epsilon_accounted" in place:
            return number(place["epsilon_accounted"])
    return number(fields.get("epsilon_accounted"))


def _own(one: Row, fields: Row, name: str) -> int | None:
    return next((found for found in (count(at.get(name)) for at in (one, fields)) if found is not None), None)


def _tails(fields: Row) -> tuple[Tail, ...]:
    found = []
    for name, rates in fields.items():
        if not _is_rate(name):
            continue
        at = row(rates)
        tpr, fpr = number(at.get("tpr")), number(at.get("fpr"))
        found.append(Tail(float(name), tpr, interval(at.get("tpr_interval")), fpr, interval(at.get("fpr_interval"))))
    return tuple(sorted(found, key=lambda tail: -tail.target))


def _allowed(fields: Row) -> Allowed | None:
    auc = number(fields.get("auc"))
    if auc is None:
        return None
    rates = {float(name): number(rate) for name, rate in row(fields.get("tpr_at_fpr")).items() if _is_rate(name)}
    return Allowed(auc, {at: rate for at, rate in rates.items() if rate is not None}, words(fields.get("by")))


def _is_rate(name: object) -> bool:
    try:
        return math.isfinite(float(name))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _baseline(fields: Row) -> Baseline:
    auc, about = number(fields.get("auc")), interval(fields.get("auc_interval"))
    at_chance = fields.get("at_chance")
    if not isinstance(at_chance, bool):
        at_chance = None if about is None else about[0] <= 0.5
    return Baseline(auc, about, at_chance, words(fields.get("why")))


def _named(fields: Row, several: str, one: str, about: str) -> tuple[Titled, ...]:
    """The listed ones in their order, then any that only cells name."""
    listed = {words(entry.get("name")): entry for entry in rows(fields.get(several))}
    every: dict[str, Row] = {words(cell.get(one)): {} for cell in rows(fields.get("cells"))}
    every = {**listed, **{name: entry for name, entry in every.items() if name not in listed}}
    return tuple(
        Titled(name, words(entry.get("title")) or name, words(entry.get(about)))
        for name, entry in every.items()
        if name
    )


def _names(value: object) -> tuple[str, ...]:
    return tuple(filter(None, map(words, value))) if isinstance(value, list | tuple) else ()


def number(value: object) -> float | None:
    """A finite number of plausible size, else None, also for True and False."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        return None
    return float(value)


def share(value: object, default: float) -> float:
    """A number strictly between 0 and 1, else the default."""
    found = number(value)
    return found if found is not None and 0 < found < 1 else default


def count(value: object) -> int | None:
    """A non-negative integer, else None."""
    found = number(value)
    return None if found is None or found < 0 or found != int(found) else int(found)


def words(value: object) -> str:
    """A text or a number as text, else ""."""
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def row(value: object) -> Row:
    """A mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def rows(value: object) -> tuple[Row, ...]:
    """The mappings in a list."""
    return tuple(one for one in value if isinstance(one, Mapping)) if isinstance(value, list | tuple) else ()


def interval(value: object) -> Interval | None:
    """Two numbers in order, else None."""
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    low, high = map(number, value)
    return None if low is None or high is None or low > high else (low, high)


def numbers(value: object) -> list[float]:
    """A list of finite numbers; empty if any element is not one."""
    found = [number(one) for one in value] if isinstance(value, list | tuple) else []
    kept = [one for one in found if one is not None]
    return kept if len(kept) == len(found) else []
