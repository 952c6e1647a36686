"""Our attacks and bounds beside other projects', on the same confidences, references and coins.

    python benchmarks/audit_peers.py [--meter FOLDER] [--lira FOLDER] [--units 2000] [--references 16]

    ML Privacy Meter    RMIA and the loss threshold of its authors. FOLDER holds its attacks.py, from a checkout of
                        privacytrustlab/ml_privacy_meter: the package privacy-meter on PyPI is of before RMIA
    LiRA                the paper's own script. FOLDER holds plot.py, from research/mi_lira_2021 of tensorflow/privacy
    JAX Privacy         bounds from one run, Clopper-Pearson, areas: pip install jax-privacy

Projects that are not given or not installed are left out. A row compares two ways to score the same units: both areas under the
curve, and the largest difference in true-positive rate between the two curves, over false-positive rates of 0.1 % to 100 %.
Rows "as it is" show the effect of differences in definition. Rows with these differences removed must agree to rounding, and
the exit status is 1 if any does not. The differences are

    RMIA    for a population example, on which no reference trained, the Meter averages the higher half of the references'
            probabilities, and we average all. It tunes `a` on the model paired with the target, with the out-models among two
            references, and divides by zero for units in both; we tune on every reference, with all others
    LiRA    medians, and variances with denominator n; ours are means and n - 1. Its single variance is over all
            confidences inside together, so it includes the units' difficulty, and is used for both sides; ours is of residuals,
            for each side. Its offline score is a density, ours the probability of a lower confidence

The confidences are simulated: normal, with a difficulty for each unit, and a shift for members that varies over units.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from attacks import lira, rmia
from attacks.evidence import bounds
from secure_fed.runs import roc

Floats = NDArray[np.float64]
RATES = np.geomspace(1e-3, 1, 400)
ROUNDING = 1e-9
GAMES = ((1000, 200, 190), (200, 100, 100), (1800, 400, 250), (400, 40, 39))
COUNTS = ((500, 500, 0, 500), (100, 500, 0, 500), (5000, 5000, 0, 5000), (60, 900, 9, 903))
DELTA, SIGNIFICANCE = 1e-5, 0.05


@dataclass(frozen=True)
class Drawn:
    """Confidences of models (models, units) and of a population (models, population).

    Model 0 is the target, and 1 its pair, which trained on the other units; the rest are references. Each unit is in half of
    them.
    """

    phi: Floats
    population: Floats
    inside: NDArray[np.bool_]

    @property
    def members(self) -> NDArray[np.bool_]:
        truth: NDArray[np.bool_] = self.inside[0]
        return truth


def drawn(units: int, references: int, population: int, seed: int = 0) -> Drawn:
    rng = np.random.default_rng(seed)
    coins = rng.permuted(np.tile(np.arange(references) % 2 == 0, (units, 1)), axis=1).T
    first = rng.random(units) < 0.5
    inside = np.concatenate([[first, ~first], coins])
    phi = rng.normal(2, 2, units) + rng.gamma(2, 0.4, units) * inside + rng.normal(0, 0.8, inside.shape)
    z = rng.normal(2, 2, population) + rng.normal(0, 0.8, (len(inside), population))
    return Drawn(phi, z, inside)


def module(folder: Path, name: str) -> ModuleType:
    """A file of a checkout that is not a package."""
    spec = importlib.util.spec_from_file_location(f"peer_{name}", folder / f"{name}.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder / name}.py cannot be imported")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


class Table:
    """Rows of two scores for the same units; `failed` counts the rows that must agree and do not."""

    def __init__(self, members: NDArray[np.bool_]) -> None:
        self.members = members
        self.failed = 0
        print(f"{'':44}{'ours':>9}{'theirs':>9}{'curves':>10}")

    def row(self, name: str, ours: Floats, theirs: Floats, *, equal: bool) -> None:
        areas = [roc.auc(scores[self.members], scores[~self.members]) for scores in (ours, theirs)]
        one, other = (self._tpr(scores) for scores in (ours, theirs))
        apart = float(np.abs(one - other).max())
        wrong = equal and max(apart, abs(areas[0] - areas[1])) > ROUNDING
        self.failed += wrong
        print(f"{name:44}{areas[0]:9.5f}{areas[1]:9.5f}{apart:10.1e}{'  DIFFERS' if wrong else ''}")

    def _tpr(self, scores: Floats) -> Floats:
        from sklearn.metrics import roc_curve

        fpr, tpr, _ = roc_curve(self.members, scores, drop_intermediate=False)
        found: Floats = np.interp(RATES, fpr, tpr)
        return found


def against_meter(meter: ModuleType, data: Drawn, table: Table) -> None:
    p, p_z = expit(data.phi).T, expit(data.population).T
    theirs_loss = meter.run_loss(-np.log(p[:, 0]))
    table.row("loss", data.phi[0], theirs_loss, equal=True)
    references = slice(2, None)
    count = (len(data.phi) - 2) // 2
    half = np.sort(data.population[references], axis=0)[-count:]  # the population's, as in the Meter
    a = rmia.tuned_a(data.phi[references], data.inside[references], data.population[references])
    with np.errstate(divide="ignore"):
        theirs_a = float(meter.tune_offline_a(0, p, p_z, data.inside.T, logging.getLogger("meter"))[0])
    for at in (a, theirs_a):
        theirs = meter.run_rmia(0, p, p_z, data.inside.T, count, at)
        given = (data.phi[0], data.phi[references], data.inside[references], data.population[0])
        as_it_is = rmia.scores(*given, data.population[references], a=at, marginal=rmia.offline_marginal)
        table.row(f"RMIA offline, a = {at:.1f}, as it is", as_it_is, theirs, equal=False)
        # For the population, our references become their higher half; for a unit, all stay.
        taken = _with_population(given, half, at)
        table.row(f"RMIA offline, a = {at:.1f}, same population means", taken, theirs, equal=True)
    print(f"a: ours {a:.1f}, theirs {theirs_a:.1f}")


def _with_population(given: tuple[Any, ...], half: Floats, a: float) -> Floats:
    """Our scores with the population's mean over `half` of the references."""
    phi, reference_phi, inside, z = given
    means = np.log(expit(half).mean(axis=0)) - np.log1p(-expit(half).mean(axis=0))  # their sigmoid is the mean
    same = np.tile(means, (len(reference_phi), 1))
    return rmia.scores(phi, reference_phi, inside, z, same, a=a, marginal=rmia.offline_marginal)


class _Unbiased:
    """numpy with the mean as median and unbiased deviations, for a script that calls the other ones."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    median = staticmethod(np.mean)

    @staticmethod
    def std(x: Floats, axis: int) -> Any:
        return np.std(x, axis, ddof=1)


def against_lira(script: Any, data: Drawn, table: Table) -> None:
    target, references = slice(0, 1), slice(2, None)
    keep, scores = data.inside[references], data.phi[references, :, None]
    phi, own = data.phi[0], (data.phi[references], data.inside[references])

    def theirs(name: str, **more: Any) -> Floats:
        found, _ = getattr(script, name)(keep, scores, data.inside[target], data.phi[target, :, None], **more)
        return -np.asarray(found)

    table.row(
        "LiRA online, own variances, as it is", lira.online(phi, *own, False), theirs("generate_ours"), equal=False
    )
    pooled = lira.online(phi, *own, True)
    table.row("LiRA online, one variance, as it is", pooled, theirs("generate_ours", fix_variance=True), equal=False)
    density = -theirs("generate_ours_offline")
    table.row("LiRA offline, as it is, low is member", lira.offline(phi, *own, False), -density, equal=False)
    script.np = _Unbiased()
    table.row(
        "LiRA online, means and unbiased variances", lira.online(phi, *own, False), theirs("generate_ours"), equal=True
    )


def against_jax_privacy(auditing: Any) -> int:
    """Compare bounds from counts, each game written as scores of ones and zeros; returns the number of differences."""
    print(f"\n{'lower bound of epsilon':44}{'ours':>9}{'theirs':>9}")
    failed = 0
    fixed = auditing.Explicit(0.5)
    for m, r, v in GAMES:
        ins, outs = np.zeros(m // 2), np.zeros(m // 2)
        ins[:v], outs[: r - v] = 1, 1
        auditor = auditing.CanaryScoreAuditor(ins, outs)
        one = float(auditor.epsilon_one_run(SIGNIFICANCE, DELTA, threshold_strategy=fixed))
        failed += _bound(
            f"one run, {m} units, {r} guesses, {v} right", bounds.one_run_epsilon(m, r, v, DELTA, SIGNIFICANCE), one
        )
        two = float(auditor.epsilon_one_run_fdp(SIGNIFICANCE, DELTA, threshold_strategy=fixed))
        failed += _bound("    Gaussian curve", bounds.one_run_fdp(m, r, v, DELTA, SIGNIFICANCE)[1], two)
    for tp, members, fp, others in COUNTS:
        ins, outs = np.zeros(members), np.zeros(others)
        ins[:tp], outs[:fp] = 1, 1
        auditor = auditing.CanaryScoreAuditor(ins, outs)
        theirs = float(auditor.epsilon_clopper_pearson(SIGNIFICANCE, DELTA, threshold_strategy=fixed))
        ours = bounds.clopper_pearson_epsilon(tp, members, fp, others, DELTA, SIGNIFICANCE)
        failed += _bound(f"Clopper-Pearson, {tp}/{members} against {fp}/{others}", ours, theirs)
    return failed


def _bound(name: str, ours: float, theirs: float) -> bool:
    wrong = abs(ours - theirs) > 1e-4
    print(f"{name:44}{ours:9.5f}{theirs:9.5f}{'  DIFFERS' if wrong else ''}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meter", type=Path, help="folder with the attacks.py of ML Privacy Meter")
    parser.add_argument("--lira", type=Path, help="folder with the plot.py of LiRA's authors")
    parser.add_argument("--units", type=int, default=2000)
    parser.add_argument("--references", type=int, default=16, help="an even number")
    chosen = parser.parse_args()
    data = drawn(chosen.units, chosen.references, 1000)
    table = Table(data.members)
    if chosen.meter:
        against_meter(module(chosen.meter, "attacks"), data, table)
    if chosen.lira:
        against_lira(module(chosen.lira, "plot"), data, table)
    failed = table.failed
    try:
        failed += against_jax_privacy(importlib.import_module("jax_privacy.auditing"))
    except ModuleNotFoundError:
        print("JAX Privacy is left out; it is installed by   pip install jax-privacy")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
