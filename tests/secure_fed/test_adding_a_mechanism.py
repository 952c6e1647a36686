"""The code of docs/adding_a_mechanism.md, executed unchanged, is a working mechanism."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Sequence
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
from privacy.mechanisms import Gaussian, Mechanism, Named
from privacy.plan import Target, for_sums
from privacy.sampling_and_turns import FixedSize, Poisson
from secure_fed import RunConfig
from secure_fed.errors import ConfigError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.runs.directory import read_facts
from secure_fed.tensors.tensors import Tensors
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


class Liar(LAPLACE):  # type: ignore[misc, valid-type]
    """States Laplace noise, and adds none."""

    def noised(self, total: Named, clip_norm: float, stream: Any) -> dict[str, torch.Tensor]:
        return dict(total)


# The page.


def test_the_page_is_short_and_its_file_passes_the_checks(tmp_path: Path) -> None:
    assert len(PAGE.read_text(encoding="utf-8").splitlines()) < 70
    (tmp_path / "laplace.py").write_text(shown(), encoding="utf-8")
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


# A run with the mechanism.


@pytest.mark.parametrize("method", ["fedlora", "fra_lora"])
def test_it_runs_and_is_named(method: str, tmp_path: Path) -> None:
    """The result, the statement and an export name Laplace; none of them says Gaussian."""
    built = federation({**TARGET, "method.name": method}, mechanism=LAPLACE)
    result = built.run(tmp_path / "run")
    said, plan = result.summary, built.assembly.protection.plan
    assert plan is not None
    assert 0.99 * 8 < said["epsilon"] <= 8 < said["epsilon_participants"]
    z = said["noise_multiplier"]
    assert said["privacy"]["mechanism"] == (
        f"Laplace, given in Python, with noise multiplier {z:g}, every client's contribution clipped to L1 norm 0.1 over all "
        "tensors together"
    )
    assert f"LaplaceDpEvent(noise_multiplier={z})" in said["privacy"]["accountant"]
    assert any("adds less noise than it states" in one for one in said["privacy"]["not_covered"])
    assert said["privacy"]["private"] is True
    readme = (built.export(result.state, tmp_path / "out") / "README.md").read_text(encoding="utf-8")
    assert "Laplace, given in Python" in readme
    for text in (said["privacy_statement"], readme, *(one.read_text() for one in (tmp_path / "run").glob("*.json"))):
        assert "Gaussian" not in text


def test_the_ledger_is_charged_with_its_own_event(tmp_path: Path) -> None:
    built = federation(TARGET, mechanism=LAPLACE)
    said = built.run(tmp_path / "run").summary
    ledger = private_toys.own_ledger(tmp_path / "run")
    (reserved,) = (row for row in ledger.rows() if row.kind == "reserve")
    assert f"LaplaceDpEvent(noise_multiplier={said['noise_multiplier']})" in reserved.body["terms"]["event"]
    assert private_toys.charges(ledger) == [("", 1)] * 3
    assert said["epsilon_cumulative"] == said["epsilon"]


@pytest.mark.parametrize("method", ["fedlora", "fra_lora"])
@pytest.mark.parametrize("lr", [1e-4, 10.0])
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


def test_what_is_not_finite_contributes_zeros() -> None:
    built = federation(NOISE, mechanism=LAPLACE)
    client = built.assembly.clients[0]
    for bad in (math.nan, math.inf):
        contribution = Tensors({"w": torch.tensor([1.0, bad])})
        assert dense(client._clipped(contribution, C))["w"].tolist() == [0.0, 0.0]


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


def naive_delta(rate: float, z: float, count: int, epsilon: float, shift: Sequence[float] = (1.0,)) -> float:
    """The larger hockey-stick divergence of sampled Laplace sums, by summation over a grid of released values.

    shift: of each coordinate, in units of the bound. `count` releases are computed as one joint release.
    """
    step, reach = (0.01, 14 * z + 2) if len(shift) * count == 1 else (0.02, 9 * z + 2)
    x = np.arange(-reach, reach, step)
    without, moved = np.ones(1), np.ones(1)
    for _ in range(count):
        one, other = np.ones(1), np.ones(1)
        for by in shift:
            one = np.multiply.outer(one, stats.laplace.pdf(x, 0, z) * step).ravel()
            other = np.multiply.outer(other, stats.laplace.pdf(x, by, z) * step).ravel()
        other = (1 - rate) * one + rate * other
        without, moved = np.multiply.outer(without, one).ravel(), np.multiply.outer(moved, other).ravel()
    ways = ((moved, without), (without, moved))
    return max(float(np.maximum(p - math.exp(epsilon) * q, 0).sum()) for p, q in ways)


@pytest.mark.parametrize(("rate", "z", "count"), [(1.0, 1.0, 1), (0.3, 0.7, 1), (0.3, 0.7, 2), (1.0, 1.5, 2)])
def test_epsilon_is_that_of_a_naive_computation(rate: float, z: float, count: int) -> None:
    release = Poisson(100, rate).release(LAPLACE(z).event)
    for delta in (1e-3, 0.02, 0.1):
        epsilon = accounting.epsilon(release, count, delta)
        assert naive_delta(rate, z, count, epsilon) == pytest.approx(delta, rel=0.02)
        assert accounting.delta(release, count, epsilon) == pytest.approx(delta, rel=1e-3)


@pytest.mark.parametrize("epsilon", [0.0, 0.2, 0.4])
@pytest.mark.parametrize("rate", [1.0, 0.4])
def test_a_shift_of_several_coordinates_costs_no_more_than_one_by_their_sum(rate: float, epsilon: float) -> None:
    """Hence one event stands for all coordinates, as the page says. An L2 bound would not do: it allows longer L1 shifts."""
    one = naive_delta(rate, 1.0, 1, epsilon)
    for share in (0.1, 0.3, 0.5):
        assert naive_delta(rate, 1.0, 1, epsilon, (share, 1 - share)) < one
    assert naive_delta(rate, 1.0, 1, epsilon, (0.9, 0.9)) > one


@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("target", [0.5, 4.0])
def test_noise_is_calibrated_to_just_below_the_target(rate: float, target: float) -> None:
    plan = for_sums(Target(target, None, DELTA), Poisson(100, rate), 10, made=LAPLACE)
    assert 0.99 * target < plan.epsilon() <= target
    assert type(plan.mechanism) is LAPLACE
    assert plan.epsilon_participants() == accounting.epsilon(accounting.unamplified(plan.mechanism.event), 10, DELTA)
    assert plan.epsilon_participants() <= 10 / plan.noise_multiplier * (1 + 1e-3), (
        "each release is 1 / z, with no delta"
    )


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

    with pytest.raises(PlanError, match=r"knows no privacy loss distribution of PoissonSampledDpEvent.*Composed"):
        for_sums(Target(3.0, None, DELTA), Poisson(100, 0.1), 10, made=Twice)
    everybody = for_sums(Target(None, 3.0, DELTA), Poisson(100, 1.0), 5, made=Twice)
    assert everybody.epsilon() == pytest.approx(
        for_sums(Target(None, 3.0, DELTA), Poisson(9, 1.0), 10, made=LAPLACE).epsilon(), rel=1e-3
    )


def test_neither_replaced_members_nor_several_passes_have_an_event() -> None:
    with pytest.raises(PlanError, match=r"only Gaussian noise is accounted for, and this is LaplaceDpEvent"):
        for_sums(Target(3.0, None, DELTA), FixedSize(100, 10), 10, made=LAPLACE)
    with pytest.raises(PlanError, match=r"a round of 2 passes is accounted for with Gaussian noise only, not Laplace"):
        for_sums(Target(3.0, None, DELTA), Poisson(100, 0.1), 10, 2, made=LAPLACE)


def test_what_a_mechanism_states_is_what_is_accounted_for() -> None:
    """A mechanism without noise is accounted at its stated noise: nothing detects it, as the page and the statement say."""
    settings = {**NOISE, "federation.rounds": 1}
    liar, honest = (federation(settings, mechanism=one).run().summary for one in (Liar, LAPLACE))
    assert liar["epsilon"] == honest["epsilon"]
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert "every epsilon of the run is wrong, and nothing here finds out" in page


def test_a_gaussian_of_ones_own_is_the_usual_run() -> None:
    """A run with `Gaussian` given in Python has the bits of a run with the built-in mechanism."""
    own, usual = (federation(TARGET, 3, **given).run() for given in ({"mechanism": Gaussian}, {}))
    assert toys.same(own.state.tensors, usual.state.tensors)
    assert own.summary["epsilon"] == usual.summary["epsilon"]


# Settings that refuse a mechanism of one's own.

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("privacy.unit = 'none'", {"privacy.unit": "none"}),
    ("privacy.unit = 'example'", {**NOISE, "privacy.unit": "example"}),
    ("privacy.noise = 'local'", {**NOISE, "privacy.noise": "local"}),
    ("privacy.clip_quantile = 0.5", {**NOISE, "privacy.clip_quantile": 0.5}),
    ("federation.sampling = 'fixed'", {**NOISE, "federation.sampling": "fixed"}),
    ("secure_aggregation.enabled = True", {**NOISE, "secure_aggregation.enabled": True}),
    ("method.name = 'fedask'", {**NOISE, "method.name": "fedask"}),
]


@every("found, settings", REFUSED)
def test_elsewhere_it_is_refused_in_one_sentence(found: str, settings: dict[str, Any]) -> None:
    chosen = {
        name: value for name, value in settings.items() if settings["privacy.unit"] != "none" or name == "privacy.unit"
    }
    with pytest.raises(ConfigError, match=rf"{re.escape(found)} is refused with a mechanism of your own") as caught:
        federation(chosen, mechanism=LAPLACE)
    assert caught.value.setting == found.split(" ")[0]
    assert caught.value.limit.endswith("with a mechanism of your own")


class InL2(LAPLACE):  # type: ignore[misc, valid-type]
    """Stands in for a mechanism that does not set its norm: the default order is 2."""

    order = 2.0


class NoNorm(LAPLACE):  # type: ignore[misc, valid-type]
    order = math.nan


class InNoNorm(Gaussian):
    order = 3.0


WRONG: list[tuple[str, Any]] = [
    (
        "InL2 bounds contributions in the L2 norm, and its event, LaplaceDpEvent, is about .* L1 norm: set order = 1.0",
        InL2,
    ),
    ("InNoNorm bounds contributions in the L3 norm, and its event, GaussianDpEvent, is about .* L2 norm", InNoNorm),
    ("NoNorm has order nan, but it is p of a norm", NoNorm),
    (r"Laplace\(noise_multiplier=1.0\) cannot be made of a noise multiplier .* give the class", LAPLACE(1.0)),
    ("float makes float, which is no privacy.mechanisms.Mechanism", float),
]


@every("why, mechanism", WRONG)
def test_what_is_no_mechanism_or_bounds_another_norm_than_its_event_is_refused(why: str, mechanism: Any) -> None:
    with pytest.raises(ConfigError, match=f"the mechanism {why}"):
        federation(NOISE, mechanism=mechanism)


class Longer(LAPLACE):  # type: ignore[misc, valid-type]
    def scale(self, norm: Any, clip_norm: float) -> float:
        return 1.001 * float(super().scale(norm, clip_norm))


class Unmeasured(LAPLACE):  # type: ignore[misc, valid-type]
    def scale(self, norm: Any, clip_norm: float) -> float:
        return math.nan


class Negative(LAPLACE):  # type: ignore[misc, valid-type]
    def scale(self, norm: Any, clip_norm: float) -> float:
        return -1.0


@every("mechanism", [Longer, Unmeasured, Negative])
def test_a_scale_that_bounds_nothing_is_refused(mechanism: Any) -> None:
    """The run ends at the first contribution that is longer than the clip norm."""
    with pytest.raises(
        ConfigError, match=rf"{mechanism.__name__}\.scale makes contributions longer than the clip norm"
    ):
        federation({**NOISE, "training.lr": 10.0}, mechanism=mechanism).run()


class Forgetful(LAPLACE):  # type: ignore[misc, valid-type]
    def noised(self, total: Named, clip_norm: float, stream: Any) -> Any:
        return dict(list(super().noised(total, clip_norm, stream).items())[1:])


class Flat(LAPLACE):  # type: ignore[misc, valid-type]
    def noised(self, total: Named, clip_norm: float, stream: Any) -> Any:
        return {name: one.flatten()[:3] for name, one in super().noised(total, clip_norm, stream).items()}


class Silent(LAPLACE):  # type: ignore[misc, valid-type]
    def noised(self, total: Named, clip_norm: float, stream: Any) -> Any:
        return None


@every("why, mechanism", [("'.*' is missing", Forgetful), (r"'.*' has shape \(3,\)", Flat), ("NoneType", Silent)])
def test_a_noised_sum_that_is_not_the_sum_is_refused(why: str, mechanism: Any) -> None:
    with pytest.raises(ConfigError, match=rf"the mechanism {mechanism.__name__}\.noised .*{why}"):
        federation(NOISE, mechanism=mechanism).run()


def test_a_resumed_run_needs_the_same_mechanism(tmp_path: Path, small_model: Path, small_data: Path) -> None:
    config = RunConfig.from_dict(
        {
            "model": {"name": str(small_model)},
            "data": {"train": str(small_data / "train.jsonl"), "test": str(small_data / "test.jsonl")},
            "federation": {
                "clients": 4,
                "rounds": 1,
                "sampling": "poisson",
                "server_optimizer": "mean",
                "server_lr": 1.0,
            },
            "method": {"name": "bitfit"},
            "training": {"steps": 1, "together": 1},
            "privacy": {"unit": "client", "noise_multiplier": 3.0, "delta": 1e-2, "clip_norm": 1.0},
            "evaluation": {"phantoms": 0},  # their number depends on the noise, and would differ first
        }
    )
    out = tmp_path / "run"
    Federation(config, mechanism=LAPLACE).run(out)
    assert read_facts(out)["privacy"]["given"] == "Laplace(noise_multiplier=3.0)"
    for other in (None, Gaussian, lambda z: LAPLACE(2 * z)):
        with pytest.raises(
            RunDirectoryError, match=r"was started with another guarantee: privacy in run\.json differs"
        ):
            Federation(config, mechanism=other).run(out, resume=True)
    assert Federation(config, mechanism=LAPLACE).run(out, resume=True).state.round == 1
    with pytest.raises(RunDirectoryError, match=r"was trained with objects given in Python"):
        opened(out)
    assert Ledger.open(out / "private" / "budget.sqlite").spent().epsilon > 0


def test_the_file_is_a_setting_and_its_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the run with the argument, seed by seed; an edited file resumes nothing, and a stored run executes no file."""
    (tmp_path / "laplace.py").write_text(shown(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    settings = {**NOISE, "privacy.mechanism": "laplace.py", "evaluation.phantoms": 0}
    with refused(ConfigError, "privacy.mechanism"):
        Federation(
            toys.config({**settings, "privacy.mechanism": f"{tmp_path}/laplace.py@{16 * chr(48)}"})
        )  # nobody of this process has named the file
    own, given = federation(settings, 3), federation({**settings, "privacy.mechanism": ""}, 3, mechanism=LAPLACE)
    assert toys.same(own.run(tmp_path / "run").state.tensors, given.run().state.tensors)
    assert "given" not in read_facts(tmp_path / "run")["privacy"]
    federation(settings, 3).run(tmp_path / "run", resume=True)
    with refused(ConfigError, "privacy.mechanism"):
        federation(settings, mechanism=LAPLACE)
    (tmp_path / "laplace.py").write_text(shown().replace("* self.noise_multiplier", "* 2 * self.noise_multiplier"))
    with refused(ConfigError, "privacy.mechanism", hide="@[0-9a-f]{16}"):
        Federation(own.config)
    with pytest.raises(RunDirectoryError):
        federation(settings, 3).run(tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    "text",
    [
        None,
        "import nothing_of_this_name",
        "from privacy.mechanisms import Mechanism",
        "MECHANISM = 1.0",
        "MECHANISM = float",
    ],
)
def test_a_file_that_is_no_mechanism_is_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text, encoding="utf-8")
    with refused(ConfigError, "mechanism" if text == "MECHANISM = float" else "privacy.mechanism"):
        federation({**NOISE, "privacy.mechanism": str(tmp_path / "own.py")})


def test_what_is_no_file_or_not_for_clients_is_refused_before_anything_is_read() -> None:
    for settings in (
        {**NOISE, "privacy.mechanism": "laplace"},
        {**private_toys.EXAMPLE, "privacy.mechanism": "own.py"},
    ):
        with refused(ConfigError, "privacy.mechanism"):
            toys.config(settings)
