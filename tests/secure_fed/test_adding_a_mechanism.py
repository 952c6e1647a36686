"""The code of docs/adding_a_mechanism.md, executed unchanged, is a working mechanism."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from attacks.adversary.case import opened
from privacy import accounting
from privacy.entropy import SeededEntropy
from privacy.errors import PlanError
from privacy.ledger import Ledger
from privacy.mechanisms import AdaptiveGaussian, Gaussian, Mechanism
from privacy.participation import FixedSize, Poisson
from privacy.plan import Target, for_sums
from secure_fed import RunConfig
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.runs.directory import read_facts
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import NOISE, TARGET, dense, federation, one_round

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "adding_a_mechanism.md"
C = NOISE["privacy.clip_norm"]
DELTA = 1e-5


def shown() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


def executed() -> ModuleType:
    made = ModuleType("shown_laplace")
    sys.modules[made.__name__] = made
    exec(compile(shown(), "laplace.py", "exec"), made.__dict__)
    return made


LAPLACE: type[Mechanism] = executed().Laplace


# The page.


def test_the_page_is_short_and_its_file_passes_the_checks(tmp_path: Path) -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 70
    (tmp_path / "laplace.py").write_text(shown(), encoding="utf-8")
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# A run with the mechanism.


def test_it_runs_is_named_and_the_ledger_is_charged_with_its_own_event(tmp_path: Path) -> None:
    """The result, the statement and an export name Laplace; none of them says Gaussian."""
    built = federation({**TARGET, "method.name": "fra_lora"}, mechanism=LAPLACE)
    result = built.run(tmp_path / "run")
    said, ledger = result.summary, private_toys.own_ledger(tmp_path / "run")
    assert 0.99 * 8 < said["epsilon"] == said["epsilon_cumulative"] <= 8 < said["epsilon_participants"]
    z = said["noise_multiplier"]
    assert said["epsilon_participants"] == accounting.epsilon(accounting.unamplified(LAPLACE(z).event), 3, 1e-3)
    assert said["epsilon_participants"] <= 3 / z * (1 + 1e-3), "each release is 1 / z, with no delta"
    assert said["privacy"]["mechanism"] == (
        f"Laplace, given in Python, with noise multiplier {z:g}, every client's contribution clipped to L1 norm 0.1 over all "
        "tensors together"
    )
    (reserved,) = (row for row in ledger.rows() if row.kind == "reserve")
    for event in (said["privacy"]["accountant"], reserved.body["terms"]["event"]):
        assert f"LaplaceDpEvent(noise_multiplier={z})" in event
    assert private_toys.charges(ledger) == [("", 1)] * 3
    assert any("adds less noise than it states" in one for one in said["privacy"]["not_covered"])
    assert said["privacy"]["private"] is True
    readme = (built.export(result.state, tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert "Laplace, given in Python" in readme
    for text in (said["privacy_statement"], readme, *(one.read_text() for one in (tmp_path / "run").glob("*.json"))):
        assert "Gaussian" not in text


def test_a_clip_norm_that_the_mechanism_adapts_may_grow() -> None:
    built = federation(NOISE, seed=0, mechanism=lambda z: AdaptiveGaussian.of(z, 1.0, 3))
    assert built.run().state.clip_norm > 0.1


@every("method, lr", [("fedlora", 10.0), ("fra_lora", 10.0), ("fra_lora", 1e-4)])
def test_contributions_keep_to_the_l1_bound(method: str, lr: float) -> None:
    """Also for low-rank products. Longer ones are scaled to the bound; an L2 bound would let larger L1 norms through."""
    settings = {**NOISE, "method.name": method, "training.lr": lr, "privacy.clip_norm": 0.05}
    sent = [dense(reply.contribution) for _, reply in one_round(federation(settings, 1, mechanism=LAPLACE)).exchanges]
    lengths = [sum(float(one.abs().sum()) for one in tensors.values()) for tensors in sent]
    assert len(lengths) == 3
    assert all(0 < length <= 0.05 for length in lengths)
    plain = [dense(reply.contribution) for _, reply in one_round(federation(settings, 1)).exchanges]
    if lr > 1:
        assert all(length > 0.04999 for length in lengths)
        assert all(sum(float(one.abs().sum()) for one in tensors.values()) > 0.1 for tensors in plain)


def test_the_noise_is_of_its_law_and_scale() -> None:
    """Every coordinate's noise is Laplace of the stated scale; other scales and a Gaussian of equal variance are rejected."""
    total = {"a": torch.zeros(50, 100), "b": torch.full((3000,), 7.0)}
    noised = LAPLACE(1.5).noised(total, C, SeededEntropy(0).stream("laplace"))
    noise = np.concatenate([(noised[name].double() - total[name]).flatten().numpy() for name in total])
    scale = 1.5 * C

    def p(law: str, spread: float) -> float:
        return float(stats.kstest(noise, law, args=(0, spread)).pvalue)

    assert p("laplace", scale) > 1e-3
    assert max(p("laplace", scale * 2 / 3), p("laplace", scale * 3 / 2), p("norm", math.sqrt(2) * scale)) < 1e-9
    assert LAPLACE(1.5).std(C) == pytest.approx(math.sqrt(2) * scale)
    assert abs(np.corrcoef(noise[:4000], noise[4000:])[0, 1]) < 0.05


def test_the_noise_is_added_once_and_by_the_server() -> None:
    """A round's mean is the sum of clipped contributions, plus the noise of one stream, over the expected cohort."""
    found = one_round(federation({**NOISE, "privacy.noise_multiplier": 2.0}, 5, mechanism=LAPLACE))
    names = sorted(found.mean)
    total = {name: sum(dense(reply.contribution)[name] for _, reply in found.exchanges) for name in names}
    stream = SeededEntropy(5).stream("sum", 0, "change")
    noised = LAPLACE(2.0).noised({name: torch.as_tensor(total[name]) for name in names}, C, stream)
    for name in names:
        assert torch.allclose(found.mean.tensor(name).double(), noised[name].double() / 3, atol=1e-7)
    assert found.noise_std == pytest.approx(math.sqrt(2) * 2 * C / 3)


# Its privacy cost.


def naive_delta(rate: float, z: float, count: int, epsilon: float) -> float:
    """The larger hockey-stick divergence of `count` sampled Laplace sums, by summation over a grid of released values."""
    step, reach = (0.01, 14 * z + 2) if count == 1 else (0.02, 9 * z + 2)
    x = np.arange(-reach, reach, step)
    without, moved = np.ones(1), np.ones(1)
    for _ in range(count):
        one, other = (stats.laplace.pdf(x, shift, z) * step for shift in (0, 1))
        without = np.multiply.outer(without, one).ravel()
        moved = np.multiply.outer(moved, (1 - rate) * one + rate * other).ravel()
    ways = ((moved, without), (without, moved))
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in ways)


@every("rate, z, count", [(1.0, 1.0, 1), (0.3, 0.7, 1), (0.3, 0.7, 2)])
def test_epsilon_is_that_of_a_naive_computation(rate: float, z: float, count: int) -> None:
    release = Poisson(100, rate).release(LAPLACE(z).event)
    for delta in (1e-3, 0.02, 0.1):
        epsilon = accounting.epsilon(release, count, delta)
        assert naive_delta(rate, z, count, epsilon) == pytest.approx(delta, rel=0.02)
        assert accounting.delta(release, count, epsilon) == pytest.approx(delta, rel=1e-3)


def test_a_ledger_by_renyi_orders_is_charged_no_less_than_without_sampling() -> None:
    """dp_accounting has no Renyi divergences of sampled Laplace noise; unsampled ones (Mironov, proposition 6) bound them."""
    z, order = 2.0, 8.0
    plan = for_sums(Target(None, z, DELTA), Poisson(100, 0.1), 10, made=LAPLACE)
    weights = (order / (2 * order - 1), (order - 1) / (2 * order - 1))
    naive = math.log(weights[0] * math.exp((order - 1) / z) + weights[1] * math.exp(-order / z)) / (order - 1)
    assert plan.cost(orders=(order,)).rdp == pytest.approx((10 * naive,))


def test_an_event_that_no_accountant_knows_is_refused() -> None:
    from dp_accounting import ComposedDpEvent, DpEvent

    class Twice(LAPLACE):  # type: ignore[misc, valid-type]
        @property
        def event(self) -> DpEvent:
            return ComposedDpEvent((super().event, super().event))

    for sampler, passes, made in (
        (Poisson(100, 0.1), 1, Twice),
        (FixedSize(100, 10), 1, LAPLACE),  # a member is replaced
        (Poisson(100, 0.1), 2, LAPLACE),
    ):
        with refused(PlanError):
            for_sums(Target(3.0, None, DELTA), sampler, 10, passes, made=made)
    everybody = for_sums(Target(None, 3.0, DELTA), Poisson(100, 1.0), 5, made=Twice)
    assert everybody.epsilon() == pytest.approx(
        for_sums(Target(None, 3.0, DELTA), Poisson(9, 1.0), 10, made=LAPLACE).epsilon(), rel=1e-3
    )


def test_a_gaussian_of_ones_own_is_the_usual_run() -> None:
    """A run with `Gaussian` given in Python has the bits of a run with the built-in mechanism."""
    own, usual = (federation(TARGET, 3, **given).run() for given in ({"mechanism": Gaussian}, {}))
    assert toys.same(own.state.tensors, usual.state.tensors)
    assert own.summary["epsilon"] == usual.summary["epsilon"]


# Settings that refuse a mechanism of one's own.

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("privacy.unit", {"privacy.unit": "none"}),
    ("privacy.unit", {**NOISE, "privacy.unit": "example"}),
    ("privacy.noise", {**NOISE, "privacy.noise": "local"}),
    ("privacy.clip_quantile", {**NOISE, "privacy.clip_quantile": 0.5}),
    ("federation.sampling", {**NOISE, "federation.sampling": "fixed"}),
    ("secure_aggregation.enabled", {**NOISE, "secure_aggregation.enabled": True}),
    ("method.name", {**NOISE, "method.name": "fedask"}),
]


@every("setting, settings", REFUSED)
def test_elsewhere_it_is_refused_in_one_sentence(setting: str, settings: dict[str, Any]) -> None:
    with refused(ConfigError, setting) as caught:
        federation(settings, mechanism=LAPLACE)
    assert caught.value.limit.endswith("with a mechanism of your own")


def changed(name: str, base: Any = LAPLACE, **members: Any) -> Any:
    """A mechanism with other members, called `name`."""
    return type(name, (base,), members)


WRONG = [
    changed("InL2", order=2.0),  # stands in for a mechanism that does not set its norm: the default order is 2
    changed("InNoNorm", Gaussian, order=3.0),
    changed("NoNorm", order=math.nan),
    LAPLACE(1.0),
    float,
]


@every("mechanism", WRONG)
def test_what_is_no_mechanism_or_bounds_another_norm_than_its_event_is_refused(mechanism: Any) -> None:
    with refused(ConfigError, "mechanism"):
        federation(NOISE, mechanism=mechanism)


def scaled(change: Callable[[float], float]) -> dict[str, Any]:
    scale = LAPLACE(1.0).scale
    return {"scale": lambda self, norm, clip_norm: change(float(scale(norm, clip_norm)))}


def noised(change: Callable[[Any], Any]) -> dict[str, Any]:
    return {"noised": lambda self, *given: change(LAPLACE.noised(self, *given))}


BROKEN: dict[
    str, dict[str, Any]
] = {  # contributions that are longer than the clip norm, and noised sums that are not the sum
    "Longer": scaled(lambda own: 1.001 * own),
    "NoNumber": scaled(lambda own: math.nan),
    "Negative": scaled(lambda own: -1.0),
    "Forgetful": noised(lambda total: dict(list(total.items())[1:])),
    "Flat": noised(lambda total: {name: one.flatten()[:3] for name, one in total.items()}),
    "Silent": noised(lambda total: None),
}


@every("name", BROKEN)
def test_what_bounds_nothing_or_returns_no_sum_ends_the_run(name: str) -> None:
    with refused(ConfigError, "mechanism"):
        federation({**NOISE, "training.lr": 10.0}, mechanism=changed(name, **BROKEN[name])).run()


def test_a_resumed_run_needs_the_same_mechanism(tmp_path: Path, small_model: Path, small_data: Path) -> None:
    tables = {
        "model": {"name": str(small_model)},
        "data": {split: str(small_data / f"{split}.jsonl") for split in ("train", "test")},
        "federation": {"clients": 4, "rounds": 1, "sampling": "poisson", "server_optimizer": "mean", "server_lr": 1.0},
        "method": {"name": "bitfit"},
        "training": {"steps": 1, "together": 1},
        "privacy": {"unit": "client", "noise_multiplier": 3.0, "delta": 1e-2, "clip_norm": 1.0},
        "evaluation": {"dummies": 0},  # their number depends on the noise, and would differ first
    }
    config = RunConfig.from_dict(tables)
    out = tmp_path / "run"
    Federation(config, mechanism=LAPLACE).run(out)
    assert read_facts(out)["privacy"]["given"] == "Laplace(noise_multiplier=3.0)"
    for other in (None, Gaussian, lambda z: LAPLACE(2 * z)):
        with refused(RunDirectoryError):
            Federation(config, mechanism=other).run(out, resume=True)
    assert Federation(config, mechanism=LAPLACE).run(out, resume=True).state.round == 1
    with refused(RunDirectoryError):
        opened(out)
    assert Ledger.open(out / "private" / "budget.sqlite").spent().epsilon > 0


def test_the_file_is_a_setting_and_its_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the run with the argument, seed by seed. What is refused of edited and stored files: `test_adding_a_method.py`."""
    (tmp_path / "laplace.py").write_text(shown(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    settings = {**NOISE, "privacy.mechanism": "laplace.py", "evaluation.dummies": 0}
    own, given = federation(settings, 3), federation({**settings, "privacy.mechanism": ""}, 3, mechanism=LAPLACE)
    assert toys.same(own.run(tmp_path / "run").state.tensors, given.run().state.tensors)
    assert "given" not in read_facts(tmp_path / "run")["privacy"]
    federation(settings, 3).run(tmp_path / "run", resume=True)
    with refused(ConfigError, "privacy.mechanism"):
        federation(settings, mechanism=LAPLACE)


def test_a_file_that_is_no_mechanism_is_refused_and_read_only_where_clients_are_protected(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    for text in ("from privacy.mechanisms import Mechanism", "MECHANISM = 1.0", "MECHANISM = float"):
        file.write_text(text, encoding="utf-8")
        with refused(ConfigError, "mechanism" if text == "MECHANISM = float" else "privacy.mechanism"):
            federation({**NOISE, "privacy.mechanism": str(file)})
    for settings, name in ((NOISE, "laplace"), (private_toys.EXAMPLE, "own.py")):
        with refused(ConfigError, "privacy.mechanism"):
            toys.config({**settings, "privacy.mechanism": name})
