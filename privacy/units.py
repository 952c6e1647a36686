"""The unit that the costs in a ledger protect: costs add up for one unit, and for one kind of neighbours.

An epsilon bounds how well two neighbouring data sets can be distinguished. Where one run's neighbours differ in a patient and
another's in all patients of a doctor, the sum of the two epsilons holds for neither: without the doctor, the first run lacks
many patients at once. A ledger therefore stores the unit of every reservation: a name, the kind of unit, a keyed digest of
which rows belong to which unit, and the neighbours. A reservation for any other unit is refused.

The user states what digests cannot show: a patient with new rows is the same patient. The user gives the changed unit its own
name and declares that both names mean one unit; the statement is a row of the ledger. Costs for different kinds of neighbours
never add up, whatever is stated. Neither do costs for examples and for their owners: a client or a group has many examples.

A holder whose ledger is about one set of people, whatever their rows, passes `SAME_UNITS` in place of the digest. Costs then
add up over all states of the data, which never counts a unit's cost too low.
"""

from __future__ import annotations

import hmac
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from privacy.errors import LedgerError, PlanError

SAME_UNITS = (
    ""  # in place of the digest: whoever holds the data states that the units are the same, whatever their rows
)


@dataclass(frozen=True)
class Unit:
    """The unit whose presence a run's cost protects.

    name: chosen by the user, or the column that names a row's owner. kind: a client, an example, a group. members: a digest of
    which rows belong to which unit, or `SAME_UNITS`. neighbours: the difference between two neighbouring data sets.
    """

    name: str
    kind: str
    members: str
    neighbours: str

    def keyed(self, key: str) -> Unit:
        """With a keyed digest: without the key it confirms no guess about the rows."""
        return replace(self, members=keyed(key, "members", self.members) if self.members else SAME_UNITS)

    def to_dict(self) -> dict[str, str]:
        return asdict(self)

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> Unit:
        """The unit that `to_dict` wrote; ValueError for anything else."""
        match kept:
            case {"name": str(name), "kind": str(kind), "members": str(members), "neighbours": str(neighbours)}:
                if name and len(kept) == 4:
                    return cls(name, kind, members, neighbours)
        raise ValueError(f"{kept!r} is not a unit")


def keyed(key: str, purpose: str, digest: str) -> str:
    """HMAC-SHA-256 of a digest, separate for each purpose."""
    return hmac.new(bytes.fromhex(key), f"{purpose} {digest}".encode(), "sha256").hexdigest()


@dataclass
class Units:
    """The units with reservations in a ledger, by name, each with its first row; and the names declared the same."""

    used: dict[str, tuple[Unit, int]] = field(default_factory=dict)
    declared: list[tuple[str, str]] = field(default_factory=list)

    def enter(self, unit: Unit, row: int) -> None:
        self.used.setdefault(unit.name, (unit, row))

    def declare(self, one: str, other: str) -> None:
        self.declared.append((one, other))

    def same(self, name: str) -> set[str]:
        """All names that were declared the same as this one, including itself."""
        found: set[str] = set()
        new = {name}
        while new:
            found |= new
            new = {name for pair in self.declared if found & set(pair) for name in pair} - found
        return found

    def require(self, path: Path, unit: Unit) -> None:
        """LedgerError unless the unit's costs may be added to all costs in the ledger at `path`."""
        _check_name(unit.name)
        for known, row in self.used.values():
            if known.neighbours != unit.neighbours:
                raise LedgerError(
                    f"{path} counts privacy for neighbours {known.neighbours!r}, not {unit.neighbours!r} (row {row}): use the "
                    "same privacy.noise and federation.sampling, or another ledger"
                )
        for known, row in self.used.values():
            if _differ((known.kind, unit.kind)):
                raise LedgerError(
                    f"{path} counts privacy for unit {known.name!r}, and costs of unit {unit.name!r} do not add up with it "
                    f"(row {row}) under any declaration, since privacy.unit was {known.kind!r} and is {unit.kind!r}: use "
                    "another ledger"
                )
        if unit.name in self.used:
            self._require_unchanged(path, unit, *self.used[unit.name])
        elif self.used and not self.same(unit.name) & set(self.used):
            known, row = next(iter(self.used.values()))
            raise LedgerError(
                f"{path} counts privacy for unit {known.name!r}, and costs of unit {unit.name!r} do not add up with it (row "
                f"{row}): use another ledger, or, if each {unit.name!r} is one {known.name!r}, declare it with `"
                f"{_statement(path, known.name, unit.name)}`"
            )

    def _require_unchanged(self, path: Path, unit: Unit, known: Unit, row: int) -> None:
        if known.kind == unit.kind and unit.members in (SAME_UNITS, known.members):
            return
        how = "other rows" if known.kind == unit.kind else f"privacy.unit = {known.kind!r}, not {unit.kind!r}"
        raise LedgerError(
            f"{path} knows unit {unit.name!r} with {how} (row {row}): if they are the same people, set privacy.unit_name to a "
            f"new name and declare it with `{_statement(path, unit.name, 'NEW-NAME')}`, else use another ledger"
        )

    def _kind(self, name: str) -> str:
        """The kind of a unit that has reserved, or whose name is a kind (the default); "" if it is not known yet."""
        if name in self.used:
            return self.used[name][0].kind
        return name if name in _KINDS else ""

    def require_declarable(self, path: Path, one: str, other: str) -> None:
        """LedgerError for a statement that adds nothing, mixes kinds, or names no unit of this ledger."""
        for name in (one, other):
            _check_name(name)
        if other in self.same(one):
            raise LedgerError(f"{path} counts {one!r} and {other!r} as the same unit already: no declaration is needed")
        kinds = {name: self._kind(name) for name in sorted(self.same(one) | self.same(other))}
        if _differ(kinds.values()):
            said = ", ".join(f"{name!r} is of kind {kind!r}" for name, kind in kinds.items() if kind)
            raise LedgerError(
                f"{path} cannot count {one!r} and {other!r} as one unit, since an example is no client and no group ({said}): "
                "use another ledger"
            )
        known = {*self.used, *(name for pair in self.declared for name in pair)}
        if not known & {one, other}:
            names = ", ".join(map(repr, sorted(known))) or "none"
            raise LedgerError(
                f"{path} knows neither unit {one!r} nor {other!r}: name at least one of its units: {names}"
            )


def _differ(kinds: Iterable[str]) -> bool:
    """Whether, among the known kinds, some are examples and others are not."""
    return len({kind == "example" for kind in kinds if kind}) > 1


def _statement(path: Path, *names: str) -> str:
    return shlex.join(["secure-fed", "budget", "same", str(path), *names])


def _check_name(name: str) -> None:
    if not name or not name.isprintable():
        raise PlanError(
            f"a unit cannot be called {name!r} in a ledger: set privacy.unit_name to a name of printable characters"
        )


_KINDS = ("example", "client", "group")
