"""The runs of one configuration as one row of numbers, and the privacy cost of several runs together.

Everything is read from the run directories. What several runs reveal about a unit that is in all of them is in `totals`: costs
add up for one unit and one kind of neighbours. Two runs are about different units if

- they protect units of another kind or name, or have other neighbouring data sets;
- they generate the built-in notes with different seeds: then the notes differ, and nobody is in both;
- secure-fed assigned rows to clients, and not a column of the data, with another seed or other settings: then the rows of one
  run's client belong to many clients of the other run, and nothing bounds the cost to all their rows together.

For runs about one unit, (epsilon, delta) is the sum, or epsilon at the same delta by Renyi composition if that is less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from statistics import fmean, stdev
from typing import Any, Literal, NamedTuple

from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.data.sources import generated
from secure_fed.learning.tasks.headline import Commonest, first_metrics, has_accuracy, headline, leads, no_better
from secure_fed.report.record import RunRecord
from secure_fed.runs.budget import unit_name


class Spread(NamedTuple):
    """A mean over seeds, and the sample standard deviation (of n - 1), None for a single seed."""

    mean: float
    deviation: float | None


class Point(NamedTuple):
    """A round in which the headline metric was measured: its mean over the seeds, and the mean of the bytes sent until then."""

    round: int
    score: Spread
    bytes: float


@dataclass(frozen=True)
class Row:
    """One configuration over its seeds. Sizes and times are means over the seeds, of all clients and the whole run."""

    name: str
    method: str
    seeds: tuple[int, ...]
    rounds: float  # mean number of finished rounds
    accuracy: Spread | None  # None if a run did not measure it
    commonest: float | None  # mean share of the test set's most frequent label
    no_better: str  # the sentence on an accuracy that is not above `commonest`
    metrics: Mapping[str, Spread | None]  # the task's main metrics beside accuracy
    bytes_up: float
    bytes_down: float
    bytes_up_round: float
    bytes_down_round: float
    seconds: float
    target: float | None  # of the headline metric; None if none is set
    reached: int  # number of runs that reached the target
    rounds_to_target: float | None  # mean over these runs
    epsilon_one_run: float | None  # largest epsilon of a run, None without privacy
    delta_one_run: float | None  # of the same run
    epsilon_all_seeds: float | None  # of all its runs together (`totals`), None if they are about different units
    delta_all_seeds: float | None
    membership_auc: Spread | None  # None if a run did not measure it
    early: int  # number of runs that ended before their last round
    headline: str  # the task's headline metric, which curve and target are of
    curve: tuple[Point, ...]
    scores: tuple[float | None, ...] = ()  # the headline metric of each seed's run
    charges: tuple[Charge, ...] = ()  # the cost of each private run
    own_first: bool = False  # whether the task's own metrics are more informative than accuracy
    held_out: tuple[
        str, ...
    ] = ()  # how the runs held test rows out of training rows; empty if all were given test rows
    no_membership: str = ""  # why a run has no membership figure


def row_of(name: str, runs: Mapping[int, RunRecord], target: float | None) -> Row:
    """The row of finished runs, given by seed. target: by default the configuration's evaluation.target_accuracy."""
    records = list(runs.values())
    results = [record.result or {} for record in records]
    settings = records[0].config
    data, measured = settings.data, headline(settings.data.task)
    target = settings.evaluation.target_accuracy if target is None else target
    target = target if has_accuracy(data.task) else None
    reached = [] if target is None else _reached(records, target, measured)
    charges = tuple(charge for record in records if (charge := charge_of(name, record)) is not None)
    private = len(charges) == len(records)  # a sum over some of the runs would promise too much
    dearest = max(charges, key=lambda charge: charge.epsilon) if private else None
    together = totals(charges) if private else []
    all_seeds = together[0] if len(together) == 1 else None
    found = [result.get("membership") for result in results]
    memberships = [one if isinstance(one, Mapping) else {} for one in found]
    without = [str(one.get("why") or "") for one in memberships if one.get("auc") is None]
    tested = {str(result.get("test", {}).get("from", "")) for result in results}
    accuracy = spread_of(results, lambda result: result.get("accuracy"))
    common = _commonest(results)

    def mean(field: str) -> float:
        return fmean(float(result[field]) for result in results)

    return Row(
        name=name,
        method=settings.method.name,
        seeds=tuple(runs),
        rounds=mean("rounds"),
        accuracy=accuracy,
        commonest=common.share if common else None,
        no_better=no_better(accuracy.mean if accuracy else None, common),
        metrics={name: spread_of(results, partial(_metric, name)) for name in first_metrics(data.task, data.metric)},
        bytes_up=mean("bytes_up"),
        bytes_down=mean("bytes_down"),
        seconds=mean("seconds"),
        bytes_up_round=fmean(result["bytes_up"] / result["rounds"] for result in results),
        bytes_down_round=fmean(result["bytes_down"] / result["rounds"] for result in results),
        target=target,
        reached=len(reached),
        rounds_to_target=fmean(reached) if reached else None,
        epsilon_one_run=dearest.epsilon if dearest else None,
        delta_one_run=dearest.delta if dearest else None,
        epsilon_all_seeds=all_seeds.epsilon if all_seeds else None,
        delta_all_seeds=all_seeds.delta if all_seeds else None,
        membership_auc=spread_of(memberships, lambda one: one.get("auc")),
        no_membership=next(filter(None, without), ""),
        early=sum(bool(result.get("ended_early")) for result in results),
        headline=measured,
        curve=_curve(records, measured),
        scores=tuple(_metric(measured, result) for result in results),
        charges=charges,
        own_first=leads(data.task),
        held_out=tuple(sorted(origin for origin in tested if not is_declared(origin))),
    )


def _commonest(results: Sequence[Mapping[str, Any]]) -> Commonest | None:
    """The mean share of the most frequent label. Its count of labels is one test set's: the seeds may share one test set."""
    found = [Commonest.of_result(result) for result in results]
    known = [common for common in found if common is not None]
    if len(known) < len(found):
        return None
    return Commonest(fmean(common.share for common in known), min(common.of for common in known))


def spread_of(results: Iterable[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]) -> Spread | None:
    """The spread of a number that is finite in every result; otherwise None, since a mean over some seeds would mislead."""
    values = [read(result) for result in results]
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    return spread([float(value) for value in values])


def spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None)


class Difference(NamedTuple):
    """A configuration's score less another's, the mean over runs with the same seeds; interval: 95 %, None for one seed.

    The interval is Student's of the differences, so noise that a seed brings to both runs (its notes, clients and cohorts)
    cancels. It is exact for normal differences.
    """

    name: str
    other: str
    metric: str
    mean: float
    interval: tuple[float, float] | None
    seeds: int


def differences(rows: Sequence[Row]) -> list[Difference]:
    """Every later configuration against the first, where both measured the same metric with every seed."""
    from scipy.stats import t

    first, found = rows[0], []
    for row in rows[1:]:
        pairs = [(own, other) for own, other in zip(row.scores, first.scores, strict=True) if None not in (own, other)]
        if row.headline == first.headline and len(pairs) == len(row.seeds):
            mean, deviation = spread([own - other for own, other in pairs])  # type: ignore[operator]
            width = None if deviation is None else t.ppf(0.975, len(pairs) - 1) * deviation / math.sqrt(len(pairs))
            interval = None if width is None else (float(mean - width), float(mean + width))
            found.append(Difference(row.name, first.name, row.headline, mean, interval, len(pairs)))
    return found


def _reached(records: Sequence[RunRecord], target: float, metric: str) -> list[int]:
    """The first round at the target, for each run that reached it."""
    rounds = [[number for number, value in record.series(metric) if value >= target] for record in records]
    return [each[0] for each in rounds if each]


def _metric(name: str, result: Mapping[str, Any]) -> Any:
    """A metric that is a key of the result, or of its `metrics`."""
    return result.get(name, (result.get("metrics") or {}).get(name))


def _curve(records: Sequence[RunRecord], metric: str) -> tuple[Point, ...]:
    """The rounds that every run measured; after the end of an early run, the mean of the others would jump."""
    measured = [dict(record.series(metric)) for record in records]
    sent = [_sent(record) for record in records]
    common = sorted(set.intersection(*map(set, measured)))
    return tuple(
        Point(number, spread([one[number] for one in measured]), fmean(one[number] for one in sent))
        for number in common
    )


def _sent(record: RunRecord) -> dict[int, int]:
    """Bytes up and down until the end of each round."""
    sent = accumulate(row["bytes_up"] + row["bytes_down"] for row in record.rounds)
    return dict(zip((row["round"] for row in record.rounds), sent, strict=True))


Apart = Literal["", "notes", "clients"]  # why another seed has other units; "" if it has the same


@dataclass(frozen=True)
class Charge:
    """The cost of one private run, and the units that bear it."""

    name: str
    seed: int
    unit: str  # in words, as neighbours
    neighbours: str
    promise: tuple[str, str, str]  # kind and name of the unit, and the neighbours
    people: Hashable  # a key that distinguishes the units of runs with the same promise
    apart: Apart
    epsilon: float
    epsilon_participants: float  # against observers who also see who takes part
    delta: float
    renyi: Mapping[float, float]  # the divergences of all releases, by order
    public_test: bool  # whether its accuracy was measured on a public test set


@dataclass(frozen=True)
class Total:
    """The cost of all charges about one unit together. epsilon: the lesser of Renyi composition and epsilon_basic, the sum."""

    charges: tuple[Charge, ...]
    epsilon: float
    epsilon_basic: float
    epsilon_participants: float
    delta: float

    @property
    def unit(self) -> str:
        return self.charges[0].unit

    @property
    def apart(self) -> Apart:
        return self.charges[0].apart

    def to_dict(self) -> dict[str, Any]:
        """The total for programs."""
        return {
            "unit": self.unit,
            "neighbours": self.charges[0].neighbours,
            "configurations": list(dict.fromkeys(charge.name for charge in self.charges)),
            "seeds": list(dict.fromkeys(charge.seed for charge in self.charges)),
            "runs": len(self.charges),
            "epsilon": self.epsilon,
            "epsilon_basic": self.epsilon_basic,
            "epsilon_participants": self.epsilon_participants,
            "delta": self.delta,
        }


def charge_of(name: str, record: RunRecord) -> Charge | None:
    """The cost of a finished run; None for a run without privacy, or with a void guarantee."""
    config, result = record.config, record.result or {}
    stated = result.get("privacy")
    if not isinstance(stated, Mapping) or not stated["private"]:
        return None
    apart, people = _people(record)
    return Charge(
        name=name,
        seed=config.federation.seed,
        unit=stated["unit"],
        neighbours=stated["adjacency"],
        promise=(config.privacy.unit, unit_name(config), stated["adjacency"]),
        people=people,
        apart=apart,
        epsilon=float(result["epsilon"]),
        epsilon_participants=float(result["epsilon_participants"]),
        delta=float(result["delta"]),
        renyi={float(order): found for order, found in stated.get("renyi", {}).items()},
        public_test=is_declared(result["test"]["from"]),
    )


def _people(record: RunRecord) -> tuple[Apart, Hashable]:
    """Why another seed has other units, and the key that distinguishes a run's units from other runs' beside their name."""
    config, made = record.config, generated(record.config.data)
    drawn = config.privacy.unit == "client" and record.facts["partition"]["kind"] != "natural"
    if drawn:
        return ("notes" if made else "clients"), (config.federation.seed, config.federation.clients, config.data)
    return ("notes", config.federation.seed) if made else ("", None)


def totals(charges: Iterable[Charge]) -> list[Total]:
    """One total for every unit that the charges are about."""
    by_unit: dict[Hashable, list[Charge]] = {}
    for charge in charges:
        by_unit.setdefault((charge.promise, charge.people), []).append(charge)
    return [_total(tuple(own)) for own in by_unit.values()]


def _total(charges: tuple[Charge, ...]) -> Total:
    from privacy import composition

    basic, delta = math.fsum(one.epsilon for one in charges), math.fsum(one.delta for one in charges)
    epsilon = basic
    if len(charges) > 1 and delta < 1:
        found = composition.together([one.renyi for one in charges])
        epsilon = min(basic, composition.epsilon(found, delta))
    against_all = all(one.epsilon_participants == one.epsilon for one in charges)
    seen = epsilon if against_all else math.fsum(one.epsilon_participants for one in charges)
    return Total(charges, epsilon, basic, seen, min(1.0, delta))


def best_only(total: Total) -> tuple[float, float] | None:
    """The (epsilon, delta) of publishing only the best of a random number of such runs, on average `len(total.charges)`.

    Every run draws its configuration at random from these. None if there is a single run, or no Renyi divergences.
    """
    from privacy import composition

    runs, delta = len(total.charges), max(one.delta for one in total.charges)
    one = composition.largest([charge.renyi for charge in total.charges])
    if runs < 2 or not one:
        return None
    laws = (composition.of_best(law, float(runs), one) for law in composition.LAWS)
    return min(composition.epsilon(found, delta) for found in laws), delta
