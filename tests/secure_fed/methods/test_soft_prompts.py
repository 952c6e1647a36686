"""Prompt tuning, prefix tuning and P-tuning as federated methods: the tensors sent, per-example gradients, whole runs."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.virtual_tokens import EncodedPromptTokens, Keys
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.methods import build
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import CHANGE, Method, State
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import small_models, toys
from tests.secure_fed.adapters import counts
from tests.secure_fed.example_gradients import one_by_one, path_for, together

NAMES = ("prompt_tuning", "prefix_tuning", "p_tuning")
CPU, PAD_0 = torch.device("cpu"), Collate(0)
PREFIXED = ("bert", "roberta", "llama", "gpt2")
CELLS = [
    (name, architecture)
    for name in NAMES
    for architecture in (PREFIXED if name == "prefix_tuning" else small_models.ARCHITECTURES)
]


def settings(name: str, **more: Any) -> dict[str, Any]:
    """Settings of a run of `toys`, with options that these methods do not read left at their defaults."""
    usual = {"method.name": name, "method.prompt_length": 3, "method.rank": 8, "method.modules_to_save": []}
    return {**usual, **more}


def method_of(name: str, **more: Any) -> Method:
    return build(toys.config(settings(name, **more)))


def items(count: int, seed: int = 3) -> list[dict[str, Any]]:
    """Texts of unequal lengths; each class has its own twelve words."""
    rng = np.random.default_rng(seed)
    labels = [i % small_models.LABELS for i in range(count)]
    words = [2 + 12 * label + rng.integers(0, 12, 3 + (4 * i) % 9) for i, label in enumerate(labels)]
    return [{"input_ids": ids, "labels": label} for ids, label in zip(words, labels, strict=True)]


def start(name: str, architecture: str = "bert", seed: int = 0) -> tuple[nn.Module, State]:
    model = small_models.make(architecture)
    return model, State(method_of(name).prepare(model, small_models.head_of(model), seed))


def away(model: nn.Module, names: Tensors) -> Placed:
    """The training tensors, moved away from their initial values, in the model's dtype."""
    generator = torch.Generator().manual_seed(1)
    first = {name: model.get_parameter(name).detach().clone() for name in names}
    moving = {
        name: (tensor + 0.1 * torch.randn(tensor.shape, generator=generator)).requires_grad_()
        for name, tensor in first.items()
    }
    return Placed(first, moving, {})


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "attention_probs_dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


# Per-example gradients.


@pytest.mark.parametrize(
    ("name", "architecture"), chosen(CELLS, (cell for cell in CELLS if cell[1] in ("bert", "deberta_v3", "gpt2")))
)
def test_gradients_are_made_in_one_pass_and_are_each_examples_own(name: str, architecture: str) -> None:
    model, state = start(name, architecture)
    objective = Objective(without_dropout(model.double()), classification.loss, CPU)
    placed, batch = away(model, state.tensors), items(5)
    assert path_for(objective, PAD_0, placed, batch) is together
    found = together(objective, PAD_0, placed, batch)
    expected = one_by_one(objective, PAD_0, placed, batch)
    for key, gradient in expected.items():
        torch.testing.assert_close(found[key], gradient, rtol=1e-8, atol=1e-12)
    own = [gradient for key, gradient in expected.items() if ".prompt." in key or ".prefix." in key]
    assert own
    assert all(gradient.flatten(1).norm(dim=1).min() > 1e-8 for gradient in own)


def test_an_lstm_has_its_gradients_made_one_at_a_time() -> None:
    model = small_models.make("bert")
    method = Averaged(EncodedPromptTokens(3, network="LSTM"), method_of("p_tuning").card)
    tensors = method.prepare(model, small_models.head_of(model), 0)
    objective = Objective(without_dropout(model.double()), classification.loss, CPU)
    assert path_for(objective, PAD_0, away(model, tensors), items(5)) is one_by_one


# The tensors sent, and their mean.


@pytest.mark.parametrize("name", NAMES)
def test_what_travels_is_the_prompt_and_the_head(name: str) -> None:
    model, state = start(name)
    method: Any = method_of(name)
    head = small_models.head_of(model)
    own = set(state.tensors) - set(head)
    part = "bert.prefix." if name == "prefix_tuning" else "bert.prompt."
    assert own
    assert all(tensor.startswith(part) for tensor in own)
    plan = method.plan(state)
    assert set(plan.trainable) == set(plan.down) == set(state.tensors)
    adapter = method.adapter
    held = counts.prefix(adapter, Keys(2, 2, 8)) if name == "prefix_tuning" else counts.prompt(adapter, 16)
    counted = sum(parameter.numel() for parameter in map(model.get_parameter, head))
    assert method.layout(state, CHANGE).size == held + counted


@pytest.mark.parametrize("name", NAMES)
def test_a_round_is_the_mean_of_the_clients_parameters(name: str) -> None:
    _, state = start(name)
    method = method_of(name)
    generator = torch.Generator().manual_seed(2)

    def client() -> Tensors:
        return Tensors((n, state.tensors.tensor(n) + torch.randn(t.shape, generator=generator)) for n, t in members)

    members = list(state.tensors.items())
    afters = [client() for _ in range(3)]
    changes = [method.contribute(CHANGE, state.tensors, after, {}) for after in afters]
    after = method.apply(state, {CHANGE: (changes[0] + changes[1] + changes[2]) * (1 / 3)})
    assert after.round == 1
    for key in state.tensors:
        expected = torch.stack([own.tensor(key).double() for own in afters]).mean(0)
        torch.testing.assert_close(after.tensors.tensor(key).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_prepare_is_a_function_of_its_arguments(name: str) -> None:
    torch.manual_seed(1)
    first = start(name)[1].tensors
    torch.manual_seed(2)
    assert toys.same(first, start(name)[1].tensors)
    assert not toys.same(first, start(name, seed=1)[1].tensors)


# Settings.


def test_settings_that_are_read_and_others() -> None:
    assert method_of("prompt_tuning", **{"method.prompt_length": 7}).adapter.length == 7  # type: ignore[attr-defined]
    run = RunConfig().replace({("method", "name"): "prefix_tuning", ("model", "max_length"): 50})
    assert build(run).adapter.max_length == 50  # type: ignore[attr-defined]
    for name in NAMES:
        with pytest.raises(ConfigError, match=r"method.rank = 4 has no effect"):
            method_of(name, **{"method.rank": 4})


def test_a_named_model_without_room_is_refused_before_the_run() -> None:
    values: dict[str, Any] = {"model.name": "builtin/tiny", "method.name": "prompt_tuning", "method.prompt_length": 33}
    values |= {"data.examples": 20, "data.test_examples": 4, "federation.clients": 2}
    run = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in values.items()})  # type: ignore[misc]
    with pytest.raises(MethodError, match=r"model.max_length = 128 .* need 161 positions, and BertModel has 160"):
        Federation(run)


# Whole runs.


def federation(name: str, architecture: str, more: dict[str, Any]) -> Federation:
    model = small_models.make(architecture)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(8)
    train = [items(12, seed) for seed in range(3)]
    chosen = {"training.lr": 0.02, "training.steps": 8, "federation.rounds": 5, "training.batch_size": 12}
    return toys.federation(settings(name, **{**chosen, **more}), model=model, train=train, test=items(30, 9))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "architecture"),
    chosen(
        [*((name, "bert") for name in NAMES), ("prefix_tuning", "llama")],
        [("p_tuning", "bert")],
    ),
)
def test_a_run_learns(name: str, architecture: str) -> None:
    result = federation(
        name, architecture, {"federation.rounds": 8}
    ).run()  # dropout makes the losses of the first rounds noisy
    losses = [record["train_loss"] for record in result.records]
    assert losses[-1] < 0.9 * losses[0]
    assert result.state.tensors.is_finite()


@pytest.mark.parametrize(
    ("unit", "name"),
    chosen(
        itertools.product(["client", "example"], NAMES),
        [("client", "p_tuning")],
    ),
)
def test_a_private_run(name: str, unit: str) -> None:
    noise = {"privacy.unit": unit, "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-3, "privacy.clip_norm": 0.5}
    built = federation(
        name, "bert", {**noise, "training.optimizer": "sgd", "training.steps": 2, "federation.rounds": 2}
    )
    result = built.run()
    assert result.summary["unit"] == unit
    assert result.state.tensors.is_finite()
    assert 0 < result.summary["epsilon"] < 100


@pytest.mark.parametrize("name", NAMES)
def test_training_moves_the_prompt_and_leaves_the_base(name: str) -> None:
    built = federation(name, "bert", {"federation.rounds": 1})
    model: Any = built.assembly.problem.model
    kept = {key: tensor.detach().clone() for key, tensor in model.named_parameters() if not tensor.requires_grad}
    before = {key: tensor.detach().clone() for key, tensor in model.named_parameters() if tensor.requires_grad}
    after = built.run().state.tensors
    assert kept
    assert all(torch.equal(model.get_parameter(key), tensor) for key, tensor in kept.items())
    assert set(after) == set(before)
    assert all(_apart(after.tensor(key), tensor) for key, tensor in before.items())


def _apart(left: Tensor, right: Tensor) -> bool:
    return float((left - right).abs().max()) > 1e-4
