"""The runs of one configuration as one row of numbers, read from their run directories."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, stdev
from typing import Any, NamedTuple

from secure_fed.commands.comparison.totals import Charge, charge_of, totals
from secure_fed.config import RunConfig
from secure_fed.learning.data.holdout import is_declared
from secure_fed.learning.tasks.commonest import Commonest, no_better
from secure_fed.learning.tasks.headline import first_metrics, has_accuracy, headline, leads
from secure_fed.report.record import RunRecord


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
    """One configuration over its seeds. Sizes and times are means over the seeds, of all clients and the whole run.

    accuracy, membership_auc: None if a run did not measure it. commonest: mean share of the test set's most frequent label;
    no_better: the sentence on an accuracy that is not above it. metrics: the task's main metrics beside accuracy. rounds: mean
    number of finished rounds. headline: the task's headline metric, which curve and target are of. target: None if none is
    set; reached: the number of runs that reached it; rounds_to_target: the mean over these runs. epsilon_one_run: the largest
    epsilon of a run, None without privacy; delta_one_run: the same run's delta. epsilon_all_seeds, delta_all_seeds: the total
    of all its runs (`totals`), None if they are about different units. charges: the cost of each private run. early: the
    number of runs that ended before their last round. own_first: whether the task's own metrics are more informative than
    accuracy. held_out: how the runs held test rows out of their training rows; empty if all were given test rows.
    no_membership: why a run has no membership figure.
    """

    name: str
    method: str
    seeds: tuple[int, ...]
    rounds: float
    accuracy: Spread | None
    commonest: float | None
    no_better: str
    metrics: Mapping[str, Spread | None]
    bytes_up: float
    bytes_down: float
    bytes_up_round: float
    bytes_down_round: float
    seconds: float
    target: float | None
    reached: int
    rounds_to_target: float | None
    epsilon_one_run: float | None
    delta_one_run: float | None
    epsilon_all_seeds: float | None
    delta_all_seeds: float | None
    membership_auc: Spread | None
    early: int
    headline: str
    curve: tuple[Point, ...]
    charges: tuple[Charge, ...] = ()
    own_first: bool = False
    held_out: tuple[str, ...] = ()
    no_membership: str = ""


def row_of(name: str, runs: Mapping[int, RunRecord], target: float | None) -> Row:
    """The row of finished runs, given by seed. target: by default the configuration's evaluation.target_accuracy."""
    records = list(runs.values())
    results = [record.result or {} for record in records]
    settings = records[0].config
    data = settings.data
    target = _target(settings, target)
    measured = headline(settings.data.task)
    reached = [] if target is None else _reached(records, target, measured)
    found = [charge_of(name, record) for record in records]
    charges = tuple(charge for charge in found if charge is not None)
    private = len(charges) == len(records)  # a sum over some of the runs would promise too much
    dearest = max(charges, key=lambda charge: charge.epsilon) if private else None
    together = totals(charges) if private else []
    all_seeds = together[0] if len(together) == 1 else None

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
        membership_auc=spread_of(results, _membership_auc),
        no_membership=next((why for result in results if (why := _no_membership(result))), ""),
        early=sum(bool(result.get("ended_early")) for result in results),
        headline=measured,
        curve=_curve(records, measured),
        charges=charges,
        own_first=leads(settings.data.task),
        held_out=tuple(sorted(origin for origin in {_tested(result) for result in results} if not is_declared(origin))),
    )


def _tested(result: Mapping[str, Any]) -> str:
    return str(result.get("test", {}).get("from", ""))


def spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values), stdev(values) if len(values) > 1 else None)


def spread_of(results: Iterable[Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Any]) -> Spread | None:
    """The spread of a number that is finite in every result; otherwise None, since a mean over some seeds would mislead."""
    values = [read(result) for result in results]
    if any(value is None or not math.isfinite(value) for value in values):
        return None
    return spread([float(value) for value in values])


def _commonest(results: Sequence[Mapping[str, Any]]) -> Commonest | None:
    """The mean share of the most frequent label. Its count of labels is one test set's: the seeds may share one test set."""
    found = [Commonest.of_result(result) for result in results]
    known = [common for common in found if common is not None]
    if len(known) < len(found):
        return None
    return Commonest(fmean(common.share for common in known), min(common.of for common in known))


def _target(settings: RunConfig, asked: float | None) -> float | None:
    """The target in `asked`, or else the configuration's own; None for a task without accuracy."""
    if not has_accuracy(settings.data.task):
        return None
    return settings.evaluation.target_accuracy if asked is None else asked


def _reached(records: Sequence[RunRecord], target: float, metric: str) -> list[int]:
    """The first round at the target, for each run that reached it."""
    rounds = [[number for number, value in record.series(metric) if value >= target] for record in records]
    return [each[0] for each in rounds if each]


def _metric(name: str, result: Mapping[str, Any]) -> Any:
    """A metric that is a key of the result, or of its `metrics`."""
    return result.get(name, (result.get("metrics") or {}).get(name))


def _membership_auc(result: Mapping[str, Any]) -> Any:
    """The AUC of the membership attack on the run, if its result has one."""
    membership = result.get("membership")
    return membership.get("auc") if isinstance(membership, Mapping) else None


def _no_membership(result: Mapping[str, Any]) -> str:
    membership = result.get("membership")
    known = isinstance(membership, Mapping) and membership.get("auc") is None
    return str(membership.get("why") or "") if known and isinstance(membership, Mapping) else ""


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
    total, until = 0, {}
    for row in record.rounds:
        total += row["bytes_up"] + row["bytes_down"]
        until[row["round"]] = total
    return until
