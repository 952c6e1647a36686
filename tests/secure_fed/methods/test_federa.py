"""FeDeRA: LoRA initialised from singular vectors (`adapters/lora.py`), under each rule of averaging."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from secure_fed.errors import ConfigError
from secure_fed.learning.models.adapters.lora import LoraAdapter, pairs
from secure_fed.methods import METHODS, build, card
from secure_fed.methods.method import Method, State
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import small_models, toys
from tests.secure_fed.adapters.gradients import both
from tests.secure_fed.example_gradients import together
from tests.secure_fed.methods.learning import assert_learns
from tests.secure_fed.methods.rounds import means_of, trained

RULES = ("fedlora", "ffa_lora", "rolora", "fra_lora")
PRIVACY: dict[str, dict[str, Any]] = {
    "none": {},
    "example": {"privacy.unit": "example", "privacy.noise_multiplier": 0.3, "privacy.delta": 1e-3},
    "client": {"privacy.unit": "client", "privacy.noise_multiplier": 0.02, "privacy.delta": 1e-3},
}


def settings(rule: str, **more: Any) -> dict[str, Any]:
    return {"method.name": "federa", "method.rule": rule, "method.rank": 3, **more}


def method_of(rule: str, **more: Any) -> Any:
    return build(toys.config(settings(rule, **more)))


def start(method: Method, architecture: str = "bert") -> State:
    model = small_models.make(architecture)
    return State(method.prepare(model, small_models.head_of(model), 0))


@pytest.mark.parametrize("rule", RULES)
def test_the_rule_is_the_method_with_another_start_and_a_card_of_its_own(rule: str) -> None:
    method: Any = method_of(rule)
    usual = build(toys.config({"method.name": rule}))
    assert method.adapter == LoraAdapter(rank=3, alpha=3.0, start="singular")
    assert method.adapter.scaling == 1
    assert (method.card.name, method.card.paper) == ("federa", card("federa").paper)
    for said in ("travels", "mean_exact", "units", "memoryless"):
        assert getattr(method.card, said) == getattr(usual.card, said)
    assert type(method) is type(usual)


@pytest.mark.parametrize("rule", RULES)
def test_what_trains_and_travels_is_as_in_the_rule(rule: str) -> None:
    method, usual = method_of(rule), build(toys.config({"method.name": rule, "method.rank": 3}))
    state, other = start(method), start(usual)
    for round_ in (0, 1):
        ours, theirs = State(state.tensors, round_), State(other.tensors, round_)
        assert method.plan(ours) == usual.plan(theirs)
        (pass_name,) = method.plan(ours).passes
        assert method.layout(ours, pass_name) == usual.layout(theirs, pass_name)


def products(tensors: Tensors) -> dict[str, torch.Tensor]:
    return {p.module: tensors.tensor(p.b).double() @ tensors.tensor(p.a).double() for p in pairs(tensors)}


@pytest.mark.parametrize("rule", RULES)
def test_two_rounds_by_hand(rule: str) -> None:
    """The next product is the best rank-3 approximation of the clients' mean product where the card says `mean_exact`."""
    method = method_of(rule)
    state = start(method)
    exact = []
    for _ in range(2):
        afters = [trained(method, state, 10 * state.round + client, 0.2) for client in range(3)]
        following = method.apply(state, means_of(method, state, afters))
        clients = [products(state.tensors | after) for after in afters]
        for module, found in products(following.tensors).items():
            want = torch.stack([client[module] for client in clients]).mean(0)
            u, s, vt = torch.linalg.svd(want, full_matrices=False)
            best = u[:, :3] * s[:3] @ vt[:3]
            exact.append(torch.allclose(found, best, atol=1e-5))
        state = following
    assert all(exact) == method.card.mean_exact


def test_ffas_frozen_a_is_that_of_the_start_and_never_travels() -> None:
    method = method_of("ffa_lora")
    state = start(method)
    plan = method.plan(state)
    assert not any("lora_A" in name for name in (*plan.down, *plan.trainable))
    again = start(method)
    assert again.tensors.to_bytes() == state.tensors.to_bytes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_a_trained_state_is_a_change_of_the_original_weights(rule: str, architecture: str) -> None:
    method = method_of(rule)
    model = small_models.make(architecture)
    initial = method.prepare(model, small_models.head_of(model), 0)
    state = State(initial)
    for _ in range(2):
        afters = [trained(method, state, 7 * state.round + client) for client in range(2)]
        state = method.apply(state, means_of(method, state, afters))
    with torch.no_grad():
        for name in state.tensors:
            model.get_parameter(name).copy_(state.tensors.tensor(name))
    form = method.as_lora(initial, state.tensors)
    fresh = small_models.make(architecture)
    usual = LoraAdapter(rank=form.factors[next(iter(form.factors))][0].shape[0], alpha=1.0)
    usual.inject(fresh, small_models.head_of(fresh), 0)
    with torch.no_grad():
        for module, (a, b) in form.factors.items():
            fresh.get_parameter(f"{module}.lora_A.default.weight").copy_(a)
            fresh.get_parameter(f"{module}.lora_B.default.weight").copy_(b * form.adapter.scaling / usual.scaling)
        for name in small_models.head_of(model):
            fresh.get_parameter(name).copy_(state.tensors.tensor(name))
    assert torch.allclose(small_models.logits(fresh), small_models.logits(model), atol=1e-5)
    assert usual.rank == (3 if rule == "ffa_lora" else 6)


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
def test_per_example_gradients_beside_the_changed_weights(architecture: str) -> None:
    method = method_of("fedlora")
    model = small_models.make(architecture)
    tensors = method.prepare(model, small_models.head_of(model), 0)
    path, found, expected = both(model, tensors)
    assert path is together
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "privacy"),
    chosen(
        [*((rule, "none") for rule in RULES), ("fedlora", "example"), ("fra_lora", "client")],
        [*((rule, "none") for rule in RULES), ("fra_lora", "client")],
    ),
)
def test_a_run_learns(rule: str, privacy: str) -> None:
    assert_learns(settings(rule, **PRIVACY[privacy]))


def test_behind_masks_a_run_ends_where_it_does_in_the_open() -> None:
    ends = [
        toys.federation(settings("fedlora", **{"secure_aggregation.enabled": masked})).run().state.tensors
        for masked in (False, True)
    ]
    assert (ends[0] - ends[1]).norm() < 1e-4


@pytest.mark.parametrize(
    ("rule", "more", "said"),
    [
        ("fedlora", {"method.alpha": 8.0}, r"method\.alpha = 8.0 has no effect with method\.name = 'federa'"),
        ("fedlora", {"method.rslora": True}, r"method\.rslora = True has no effect with method\.name = 'federa'"),
        ("ffa_lora", {"method.freeze_init": "gaussian"}, r"method\.freeze_init = 'gaussian' has no effect"),
        (
            "fedlora",
            {**PRIVACY["client"], "method.denoise": "none"},
            r"denoise = 'none' has no effect with method\.rule = 'fedlora'",
        ),
        ("rolora", {"method.transport_form": "sketch"}, r"form = 'sketch' has no effect .*'rolora'.*'fra_lora'"),
        ("rolora", {"federation.server_optimizer": "adam"}, r"'adam' .* method\.rule = 'rolora': B and A .*use 'mean'"),
        (
            "fra_lora",
            {**PRIVACY["client"], "federation.server_optimizer": "adam", "method.denoise": "shrink"},
            r"'shrink' needs one noise level.*'adam' scales.*'tangent'",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(rule: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        method_of(rule, **more)


def test_settings_reach_the_rule() -> None:
    more = {"method.transport_form": "sketch", "method.sketch": 5, "method.denoise": "truncate", **PRIVACY["client"]}
    method = method_of("fra_lora", **more, **{"method.dropout": 0.25, "method.target_modules": ["key"]})
    assert (method.sketch, method.denoise) == (5, "truncate")
    assert (method.adapter.dropout, method.adapter.target_modules) == (0.25, ("key",))
    assert set(RULES) <= set(METHODS)
    momentum = {"federation.server_optimizer": "momentum"}
    for rule in ("fedlora", "ffa_lora", "fra_lora"):
        assert method_of(rule, **momentum).card.memoryless == ""
