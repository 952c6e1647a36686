"""Modules behind blocks: their places, and bottlenecks, Compacter, mixtures of experts and IA3 against computations by hand."""

from __future__ import annotations

import math
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from peft import IA3Config, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional
from transformers import FNetConfig, FNetModel, MixtralConfig, MixtralModel

from secure_fed.errors import MethodError
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.inserted import (
    RULE,
    Bottlenecks,
    Compacters,
    Mixture,
    Mixtures,
    Scales,
    attach,
    places,
)
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.adamix import consistent
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.adapters.behind import BLOCKS, adapted, by_hand, each_token
from tests.secure_fed.adapters.virtual import made
from tests.secure_fed.example_gradients import losses_at, together
from tests.secure_fed.test_per_example import CPU, assert_equal, texts, without_dropout

BOTH = ("attention", "feed_forward")


def gelu(x: float) -> float:
    return x * (1 + math.erf(x / math.sqrt(2))) / 2


# Places.


class Shifted(nn.Module):
    """y -> y + shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, y: Tensor) -> Tensor:
        return y + self.shift


@pytest.mark.parametrize("architecture", small_models.PLACED)
def test_two_places_a_layer_each_asked_once_a_pass(architecture: str) -> None:
    """With that layer's output; the base model's parameters keep their names."""
    model = small_models.make(architecture)
    before, names = small_models.logits(model), [name for name, _ in model.named_parameters()]
    found, seen = places(model), dict[str, list[Tensor]]()
    assert [(place.layer, place.block) for place in found] == [*product((0, 1), BOTH)]
    assert {place.width for place in found} == {16}
    for place in found:
        full = attach(model, place.module, "adapter", Shifted(place.width))
        assert full == f"{place.module}.adapter"
        layer = model.get_submodule(full)
        layer.register_forward_hook(lambda _, args, __, full=full: seen.setdefault(full, []).append(args[0]))
    assert torch.equal(small_models.logits(model), before)
    assert all(len(calls) == 1 and calls[0].shape[-1] == 16 for calls in seen.values())
    assert len(seen) == 4
    assert [name for name, _ in model.named_parameters() if not name.endswith(".adapter.shift")] == names


def test_a_layer_without_a_known_block_is_refused_by_name() -> None:
    """Experts are no single linear layer; FNet has no attention, and adapters behind its feed-forward blocks are possible."""
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 40}
    with torch.device("meta"):
        experts = MixtralModel(MixtralConfig(**shape, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0))
        mixing = FNetModel(FNetConfig(**shape))
    mixed = small_models.make("bert")
    mixed.get_submodule("bert.encoder.layer.1.attention.output").dense = nn.Identity()
    for model in (experts, mixing, mixed):
        with refused(MethodError):
            places(model)
    assert len(places(mixing, ["feed_forward"])) == len(places(experts, ["attention"])) == 2


# Bottlenecks.


@pytest.mark.parametrize("architecture", ["bert", "gpt2"])
@pytest.mark.parametrize(("blocks", "activation"), [(BOTH, "gelu"), (("feed_forward",), "relu")])
def test_bottlenecks_against_loops(architecture: str, blocks: tuple[str, ...], activation: str) -> None:
    model, _ = adapted(architecture, Bottlenecks(2, blocks, activation))
    here = {BLOCKS[architecture][block].format(layer) for block in blocks for layer in (0, 1)}
    f = {"gelu": gelu, "relu": lambda x: max(x, 0.0)}[activation]

    def written_out(at: str, y: Tensor) -> Tensor:
        own = ("down.weight", "down.bias", "up.weight", "up.bias")
        d, b_d, u, b_u = (model.get_parameter(f"{at}.adapter.{name}").detach() for name in own)

        def one(token: Tensor) -> Tensor:
            inner = [f(float(sum(d[j, i] * token[i] for i in range(16)) + b_d[j])) for j in range(len(d))]
            return torch.stack([token[i] + sum(u[i, j] * inner[j] for j in range(len(d))) + b_u[i] for i in range(16)])

        return each_token(y, one)

    expected = by_hand(model, architecture, lambda at, y: written_out(at, y) if at in here else y)
    torch.testing.assert_close(small_models.logits(model), expected)


def test_the_start_of_bottlenecks() -> None:
    """D is drawn like LoRA's A, differently at every place; everything else is zero."""
    model = small_models.make("bert")
    names = Bottlenecks(4, BOTH).inject(model, small_models.head_of(model), 3)
    downs = [model.get_parameter(name) for name in names if name.endswith("down.weight")]
    assert all(0.5 / 4 < down.abs().max() <= 1 / 4 for down in downs)
    assert len({tuple(down.flatten().tolist()) for down in downs}) == 4
    assert all(not model.get_parameter(name).any() for name in names if not name.endswith("down.weight"))


# Compacter.


@pytest.mark.parametrize("architecture", ["bert", "distilbert", "llama", "gpt2"])
def test_compacter_against_kronecker_products(architecture: str) -> None:
    """sum_i kron(A_i, s_i t_i^T), formed by numpy."""
    model, _ = adapted(architecture, Compacters(8, 4))

    def matrix(at: str, which: str) -> np.ndarray:
        names = (f"{RULE}.weight", f"{at}.adapter.{which}_left.weight", f"{at}.adapter.{which}_right.weight")
        a, s, t = (model.get_parameter(name).detach().numpy() for name in names)
        return sum(np.kron(a[i], np.outer(s[i], t[i])) for i in range(4))

    def written_out(at: str, y: Tensor) -> Tensor:
        down, up = (matrix(at, which) for which in ("down", "up"))
        b_d, b_u = (model.get_parameter(f"{at}.adapter.{which}_left.bias").detach().numpy() for which in ("down", "up"))
        assert (down.shape, up.shape) == ((8, 16), (16, 8))

        def one(token: Tensor) -> Tensor:
            inner = np.array([gelu(x) for x in down @ token.numpy() + b_d])
            return token + torch.from_numpy(up @ inner + b_u)

        return each_token(y, one)

    torch.testing.assert_close(small_models.logits(model), by_hand(model, architecture, written_out))


def test_every_factor_of_compacter_can_learn_from_the_second_step_on() -> None:
    """At the start, with s of the upper layer zero, only s and its bias have gradients; after one step all factors have."""
    model = small_models.make("bert").double()
    names = Compacters(8, 4).inject(model, small_models.head_of(model), 0)
    model.double()

    def moving() -> set[str]:
        own = [model.get_parameter(name) for name in names]
        loss = model(**small_models.batch()).logits.square().sum()
        return {name for name, g in zip(names, torch.autograd.grad(loss, own), strict=True) if g.norm() > 0}

    assert [name for name in model.state_dict() if "rule" in name] == [f"{RULE}.weight"], "one rule for all"
    first, generator = moving(), torch.Generator().manual_seed(1)
    assert {name.rpartition("adapter.")[2] for name in first} == {"up_left.weight", "up_left.bias"}
    for name in first:
        parameter = model.get_parameter(name)
        parameter.data += torch.randn(parameter.shape, generator=generator)
    assert moving() == set(names)


@pytest.mark.parametrize(("bottleneck", "n"), [(8, 3), (9, 3), (2, 4)])
def test_what_n_does_not_divide_is_refused_before_the_model_is_touched(bottleneck: int, n: int) -> None:
    model = small_models.make("bert")
    names = [name for name, _ in model.named_parameters()]
    with refused(MethodError):
        Compacters(bottleneck, n).inject(model, small_models.head_of(model), 0)
    assert [name for name, _ in model.named_parameters()] == names


# Mixtures: one random expert for a whole training pass, merged experts in evaluation.

EXPERTS = 3
Y = torch.randn(5, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mixed() -> Mixture:
    generator = torch.Generator().manual_seed(2)
    found = Mixture(6, 4, EXPERTS, generator).double()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator))
    return found


def through(mixture: Mixture, weight: Any, bias: Any, y: Tensor) -> Tensor:
    return y + functional.gelu(y @ weight.T + bias) @ mixture.up.weight.T + mixture.up.bias


def expert(mixture: Mixture, k: int, y: Tensor) -> Tensor:
    return through(mixture, mixture.downs[k].weight, mixture.downs[k].bias, y)


def test_evaluation_merges_the_experts_weights() -> None:
    mixture = mixed()
    weight, bias = (sum(getattr(down, name) for down in mixture.downs) / EXPERTS for name in ("weight", "bias"))
    expected = through(mixture, weight, bias, Y)
    torch.testing.assert_close(mixture.eval()(Y), expected)
    with torch.no_grad():
        torch.testing.assert_close(mixture.train()(Y), expected)
    assert not any(torch.allclose(expected, expert(mixture, k, Y)) for k in range(EXPERTS))


def test_a_pass_of_training_takes_one_expert_for_the_whole_batch_and_each_in_turn() -> None:
    mixture = mixed().train()
    torch.manual_seed(0)
    taken = []
    for _ in range(60):
        found = mixture(Y)
        taken.append([k for k in range(EXPERTS) if torch.allclose(found, expert(mixture, k, Y))])
    assert all(len(which) == 1 for which in taken)
    assert min(sum(which[0] == k for which in taken) for k in range(EXPERTS)) > 8


def test_places_draw_experts_for_themselves_and_the_seed_decides() -> None:
    model, _ = adapted("bert", Mixtures(4, 2))
    without_dropout(model).train()

    def logits(seed: int) -> Tensor:
        torch.manual_seed(seed)
        found: Tensor = model(**small_models.batch()).logits.detach()
        return found

    assert torch.equal(logits(1), logits(1))
    assert torch.stack([logits(seed) for seed in range(40)]).unique(dim=0).shape[0] == 4  # two places of two experts


def test_an_examples_loss_and_gradient_are_its_own_for_the_experts_drawn() -> None:
    """With the same draws an example's consistency loss is the same alone and in a batch, and `together` gives its gradient."""
    model, names = adapted("bert", Mixtures(4, EXPERTS))
    objective = Objective(without_dropout(model), consistent(classification.loss), CPU)
    begun = {n: model.get_parameter(n).detach().clone().requires_grad_() for n in [*names, "classifier.weight"]}
    where, items = Placed(begun, begun, {}), texts()
    torch.manual_seed(7)
    found = together(objective, Collate(0), where, items)
    torch.manual_seed(7)
    shared = losses_at(objective, where.moving, Collate(0)(items))
    alone, each = [], []
    for item in items:
        torch.manual_seed(7)
        loss = losses_at(objective, where.moving, Collate(0)([item])).sum()
        alone.append(loss.detach())
        each.append(torch.autograd.grad(loss, list(where.moving.values()), materialize_grads=True, allow_unused=True))
    torch.testing.assert_close(shared.detach(), torch.stack(alone))
    expected = {name: torch.stack(parts) for name, parts in zip(where.moving, zip(*each, strict=True), strict=True)}
    assert_equal(found, expected)
    untouched = [name for name in names if ".downs." in name and not expected[name].any()]
    assert untouched, "at most two of three experts of a place have a part in two passes"


# IA3.


@pytest.mark.parametrize("architecture", [name for name in small_models.ARCHITECTURES if name != "distilbert"])
def test_ia3_computes_what_pefts_layers_do(architecture: str) -> None:
    """PEFT has no default layers for DistilBERT."""
    ours, names = adapted(architecture, Scales())
    theirs = made(architecture)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about Conv1D, which it handles
        inject_adapter_in_model(IA3Config(), theirs)
    theirs.double()
    vectors = {name.partition(".ia3_l.")[0]: p for name, p in theirs.named_parameters() if ".ia3_l." in name}
    assert {name.removesuffix(".adapter.weight") for name in names} == set(vectors)
    with torch.no_grad():
        for layer, vector in vectors.items():
            vector.copy_(ours.get_parameter(f"{layer}.adapter.weight").view_as(vector))
        for name in small_models.head_of(ours):
            theirs.get_parameter(name).copy_(ours.get_parameter(name))
    found = small_models.logits(ours)
    torch.testing.assert_close(found, small_models.logits(theirs))
    for name in names:
        with torch.no_grad():
            ours.get_parameter(name).fill_(1)
        assert not torch.allclose(small_models.logits(ours), found, rtol=0, atol=1e-4), name
        found = small_models.logits(ours)


def test_in_distilbert_ia3_scales_keys_values_and_the_feed_forward() -> None:
    """Against merged weights: scaling an output scales the weight's rows and the bias, scaling an input its columns."""
    model, names = adapted("distilbert", Scales())
    merged = made("distilbert")
    with torch.no_grad():
        for name in small_models.head_of(model):
            merged.get_parameter(name).copy_(model.get_parameter(name))
        for layer, end in product((0, 1), ("attention.k_lin", "attention.v_lin", "ffn.lin2")):
            at = f"distilbert.transformer.layer.{layer}.{end}"
            scale, linear = model.get_parameter(f"{at}.adapter.weight"), merged.get_submodule(at)
            linear.get_parameter("weight").mul_(scale if end == "ffn.lin2" else scale[:, None])
            if end != "ffn.lin2":
                linear.get_parameter("bias").mul_(scale)
    assert len(names) == 6
    torch.testing.assert_close(small_models.logits(model), small_models.logits(merged))


def test_a_layer_of_the_head_is_not_scaled() -> None:
    model = small_models.make("bert")
    key = "bert.encoder.layer.1.attention.self.key"
    names = Scales().inject(model, [f"{key}.weight", f"{key}.bias"], 0)
    assert f"{key}.adapter.weight" not in names
    assert len(names) == 7
    assert model.get_parameter(f"{key}.weight").requires_grad
