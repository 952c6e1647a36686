"""Behaviour particular to one method, and the table of methods."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from secure_fed.config import MethodConfig, RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.models.adapters.lora import LoraAdapter, pairs
from secure_fed.methods import METHODS, build, cards
from secure_fed.methods.ffa_lora import FfaLora
from secure_fed.methods.fra_lora import FraLora
from secure_fed.methods.fra_then_ffa import FraThenFfa
from secure_fed.methods.method import CHANGE, State
from secure_fed.runs.directory import read_config
from secure_fed.tensors.tensors import LowRank, Tensors
from tests.secure_fed import small_models, toys

ADAPTER = LoraAdapter(rank=3, alpha=6.0)


def started(method: FfaLora | FraLora, seed: int = 0) -> State:
    model = small_models.make("bert")
    return State(method.prepare(model, small_models.head_of(model), seed))


def moved(state: State, names: tuple[str, ...], seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return Tensors(
        (n, state.tensors.tensor(n) + 0.1 * torch.randn(state.tensors[n].shape, generator=generator)) for n in names
    )


def test_importing_the_table_does_not_import_torch() -> None:
    code = "import sys, secure_fed.methods; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_cards_bear_the_names_of_the_table() -> None:
    assert [card.name for card in cards()] == list(METHODS)
    assert {card.name: card.mean_exact for card in cards()}["fedlora"] is False


def test_unknown_method_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"method\.name = 'fra-lora' .*did you mean 'fra_lora'\?"):
        build(MethodConfig(name="fra-lora"))
    with pytest.raises(ConfigError, match=f"there are {', '.join(METHODS)}"):
        build(MethodConfig(name="zzz"))


@pytest.mark.parametrize(
    ("name", "setting", "readers"),
    [
        ("fedlora", {"freeze_init": "gaussian"}, "ffa_lora"),
        ("fra_lora", {"double_rank": True}, "ffa_lora"),
        ("ffa_lora", {"switch_round": 3}, "fra_then_ffa"),
    ],
)
def test_a_setting_the_method_does_not_read_is_refused(name: str, setting: dict[str, object], readers: str) -> None:
    (option,) = setting
    with pytest.raises(ConfigError, match=rf"method\.{option} = .* no effect with method\.name = '{name}'.*{readers}"):
        build(MethodConfig(name=name, **setting))  # type: ignore[arg-type]


def test_settings_reach_the_method() -> None:
    method = build(MethodConfig(name="fedlora", rank=4, alpha=2.0, rslora=True, dropout=0.1, target_modules=("key",)))
    assert method.adapter == LoraAdapter(4, 2.0, True, 0.1, ("key",))
    assert build(MethodConfig(name="ffa_lora", freeze_init="gaussian")) == FfaLora(
        LoraAdapter(), freeze_init="gaussian"
    )


@pytest.mark.parametrize("rslora", [False, True])
def test_double_rank_keeps_the_scale(rslora: bool) -> None:
    one, two = (
        build(MethodConfig(name="ffa_lora", rank=4, rslora=rslora, double_rank=double)).adapter
        for double in (False, True)
    )
    assert two.rank == 8
    assert two.scaling == pytest.approx(one.scaling)


def test_orthonormal_a_has_orthonormal_rows() -> None:
    state = started(FfaLora(ADAPTER))
    for pair in pairs(state.tensors):
        a = state.tensors.tensor(pair.a)
        assert torch.allclose(a @ a.T, torch.eye(3), atol=1e-6)


def test_gaussian_a_has_rows_of_unit_length_on_average() -> None:
    draws = [started(FfaLora(ADAPTER, freeze_init="gaussian"), seed).tensors for seed in range(25)]
    a = torch.stack([draw.tensor(pair.a) for draw in draws for pair in pairs(draw)])
    assert a.square().sum(-1).mean() == pytest.approx(1.0, abs=0.1)
    assert abs(float((a**4).mean() / a.square().mean() ** 2) - 3) < 0.5  # a normal distribution's kurtosis


def test_frozen_a_neither_travels_nor_moves_by_a_bit() -> None:
    method = FfaLora(ADAPTER)
    state = started(method)
    names = {pair.a for pair in pairs(state.tensors)}
    for round_ in range(3):
        plan = method.plan(state)
        assert names.isdisjoint(plan.trainable)
        assert names.isdisjoint(plan.down)
        mean = method.contribute(CHANGE, state.tensors, moved(state, plan.trainable, round_), {})
        assert names.isdisjoint(mean)
        after = method.apply(state, {CHANGE: mean})
        assert all(torch.equal(after.tensors.tensor(name), state.tensors.tensor(name)) for name in names)
        state = after


def test_fedlora_averages_factors_and_misses_the_mean_product() -> None:
    """The gap is the covariance of the factors over clients: for two clients, (B_1 - B_2)(A_1 - A_2) / 4."""
    method = build(MethodConfig(name="fedlora", rank=3))
    model = small_models.make("bert")
    state = State(method.prepare(model, small_models.head_of(model), 0))
    afters = [moved(state, method.plan(state).trainable, seed) for seed in (1, 2)]
    changes = [method.contribute(CHANGE, state.tensors, after, {}) for after in afters]
    mean = method.apply(state, {CHANGE: (changes[0] + changes[1]) * 0.5}).tensors
    for pair in pairs(state.tensors):
        (a1, b1), (a2, b2) = ((after.tensor(pair.a), after.tensor(pair.b)) for after in afters)
        gap = (b1 @ a1 + b2 @ a2) / 2 - mean.tensor(pair.b) @ mean.tensor(pair.a)
        assert torch.allclose(gap, (b1 - b2) @ (a1 - a2) / 4, atol=1e-6)
        assert gap.norm() > 0.1 * (b1 @ a1).norm()


def test_fra_contributes_factors_of_twice_the_rank_with_the_scale_inside() -> None:
    method = FraLora(ADAPTER)
    state = started(method)
    after = moved(state, method.plan(state).trainable, 1)
    contribution = method.contribute(CHANGE, state.tensors, after, {})
    for pair in pairs(state.tensors):
        change = contribution[f"{pair.module}.delta"]
        assert isinstance(change, LowRank)
        assert change.rank == 6
        b, a, b_i, a_i = (side.tensor(name) for side in (state.tensors, after) for name in (pair.b, pair.a))
        assert torch.allclose(change.dense(), 2.0 * (b_i @ a_i - b @ a), atol=1e-6)


def test_norm_of_a_small_change_to_a_large_product_does_not_cancel() -> None:
    """In float32 the form [B_i, -B] [A_i; A], a difference of two products, would lose the change to cancellation."""
    method = FraLora(ADAPTER)
    state = started(method)
    generator = torch.Generator().manual_seed(0)
    large = Tensors(
        (name, 30 * torch.randn(member.shape, generator=generator)) for name, member in state.tensors.items()
    )
    after = Tensors((n, large.tensor(n) + 1e-3 * torch.randn(large[n].shape, generator=generator)) for n in large)
    contribution = method.contribute(CHANGE, large, after, {})
    for pair in pairs(large):
        b, a, b_i, a_i = (side.tensor(name) for side in (large, after) for name in (pair.b, pair.a))
        want = float((2.0 * (b_i.double() @ a_i.double() - b.double() @ a.double())).norm())
        ours = Tensors({"d": contribution[f"{pair.module}.delta"]}).norm()
        difference = LowRank(torch.cat([b_i, -b], 1) * 2.0, torch.cat([a_i, a], 0)).dense().norm()
        assert ours == pytest.approx(want, rel=1e-6)
        assert abs(float(difference) - want) > 20 * abs(ours - want)


def test_fra_splits_in_balance_with_fixed_signs() -> None:
    method = FraLora(ADAPTER)
    state = started(method)
    after = moved(state, method.plan(state).trainable, 1)
    mean = method.contribute(CHANGE, state.tensors, after, {})
    found = method.apply(state, {CHANGE: mean}).tensors
    for pair in pairs(found):
        a, b = found.tensor(pair.a), found.tensor(pair.b)
        assert torch.allclose(a @ a.T, b.T @ b, atol=1e-5)
        assert (b.gather(0, b.abs().argmax(0)[None]) > 0).all()


def test_fra_refuses_personal_factors() -> None:
    method = FraLora(ADAPTER)
    state = started(method)
    gone = pairs(state.tensors)[0].b
    with pytest.raises(MethodError, match=rf"{gone} cannot stay on the client.*method\.personal"):
        method.contribute(CHANGE, state.tensors, state.tensors.without([gone]), {})


@pytest.mark.parametrize(("rounds", "switch"), [(1, 1), (3, 1), (9, 4), (10, 5), (30, 5)])
def test_fra_then_ffa_switches_after_five_rounds_or_half_of_few(rounds: int, switch: int) -> None:
    usual = RunConfig().replace({("federation", "rounds"): rounds, ("method", "name"): "fra_then_ffa"})
    found, late = build(usual), max(rounds, 2)
    assert isinstance(found, FraThenFfa)
    assert found.switch_round == switch
    with pytest.raises(ConfigError, match=rf"switch_round is {late}, and there are {rounds} rounds.*lower it"):
        build(usual.replace({("method", "switch_round"): late}))


def test_fra_then_ffa_switches_where_its_run_began_to(tmp_path: Path) -> None:
    """Resuming with more rounds does not move the switch."""
    settings = {"method.name": "fra_then_ffa", "federation.rounds": 4}
    toys.federation(settings).run(tmp_path)
    held = read_config(tmp_path).method.switch_round
    resumed = read_config(tmp_path).override(["federation.rounds=20"])
    assert (held, getattr(build(resumed), "switch_round", None)) == (2, 2)
    with pytest.raises(ConfigError, match="switch_round is 5, and there are 4 rounds"):
        toys.federation(settings | {"method.switch_round": 5})


def test_fra_then_ffa_switches_once_and_freezes_a() -> None:
    method = build(MethodConfig(name="fra_then_ffa", rank=3, alpha=6.0, switch_round=2))
    model = small_models.make("bert")
    state = State(method.prepare(model, small_models.head_of(model), 0))
    names = {pair.a for pair in pairs(state.tensors)}
    frozen: dict[str, torch.Tensor] = {}
    for round_ in range(5):
        plan = method.plan(state)
        assert names <= set(plan.down), "a client that joins late needs A"
        assert names.isdisjoint(plan.trainable) == (round_ >= 2)
        mean = method.contribute(CHANGE, state.tensors, moved(state, plan.trainable, round_), {})
        assert any(isinstance(member, LowRank) for member in mean.values()) == (round_ < 2)
        state = method.apply(state, {CHANGE: mean})
        if round_ == 1:
            frozen = {name: state.tensors.tensor(name) for name in names}
        for name in frozen:
            a = state.tensors.tensor(name)
            assert torch.equal(a, frozen[name])
            assert torch.allclose(a @ a.T, torch.eye(3), atol=1e-6)


def test_scale_is_the_adapters() -> None:
    assert LoraAdapter(4, 8.0).scaling == 2.0
    assert LoraAdapter(4, 8.0, rslora=True).scaling == 8.0 / math.sqrt(4)
