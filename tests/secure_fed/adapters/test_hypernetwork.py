"""Adapters made by a hypernetwork, against loops over examples, tokens and entries."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.hypernetwork import SHARES, Hypernetwork, Hypernetworks, MadeAdapter, shares
from secure_fed.learning.models.adapters.insertion_points import places
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.objective import Objective
from tests.cells import every
from tests.secure_fed import small_models, toys
from tests.secure_fed.adapters import counts

SMALL = Hypernetworks(context_dim=3, bottleneck=4, hyper_dim=5)
NAMES = ["class_shares", "context_bias", "context_weight", "label_bias", "label_weight", "layer", "left", "right"]


def base(architecture: str) -> nn.Module:
    """Without dropout, and with weights of a trained model's size, so that what an adapter does can be seen."""
    model = small_models.make(architecture)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.Linear | Conv1D):
            module.weight.data *= 10
    return model


def prepared(architecture: str, seed: int = 7, away: bool = False, of_batch: bool = False) -> nn.Module:
    """With larger adapters than at the start, and class shares of somebody's, if `away`."""
    model = base(architecture)
    names = replace(SMALL, of_batch=of_batch).inject(model, small_models.head_of(model), seed)
    if away:
        generator = torch.Generator().manual_seed(3)
        for name in names:
            parameter = model.get_parameter(name)
            parameter.data += torch.randn(parameter.shape, generator=generator)
        model.get_parameter(SHARES).data = torch.tensor([0.7, 0.3, 0.0])
    return model


def network_of(model: nn.Module) -> Hypernetwork:
    found = model.get_submodule("hypernetwork")
    assert isinstance(found, Hypernetwork)
    return found


def logits(model: nn.Module, **inputs: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(**inputs).logits
    return out


# What is computed.


def by_hand(y: Tensor, mask: Tensor, network: Hypernetwork, layer: int, of_batch: bool) -> Tensor:
    """Every entry by itself, in float64."""
    p = {name: parameter.detach().double().numpy() for name, parameter in network.named_parameters()}
    y_ = y.double().numpy()
    texts = []
    for words, real in zip(y_, mask.numpy(), strict=True):
        mean = np.mean([word for word, counts in zip(words, real, strict=True) if counts], axis=0)
        texts.append(mean / math.sqrt(sum(mean**2)))
    if of_batch:
        texts = [np.max(texts, axis=0)] * len(texts)
    weight = p["left"] @ p["right"]
    weight = weight / math.sqrt((weight**2).sum())
    out = y_.copy()
    for b, text in enumerate(texts):
        label = p["label_weight"] @ p["class_shares"] + p["label_bias"]
        embedding = label + p["context_weight"] @ text + p["context_bias"] + p["layer"][layer]
        up = np.array(
            [[sum(weight[i, j * 3 + k] * embedding[k] for k in range(3)) for j in range(4)] for i in range(16)]
        )
        for n, word in enumerate(y_[b]):
            inner = up.T @ word
            gelu = [h * (1 + math.erf(h / math.sqrt(2))) / 2 for h in inner]
            out[b, n] += up @ np.array(gelu)
    return torch.from_numpy(out)


@pytest.mark.parametrize(("training", "of_batch"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("architecture", ["bert", "distilbert", "gpt2"])
def test_a_model_computes_what_the_equations_say(architecture: str, training: bool, of_batch: bool) -> None:
    adapted, model = prepared(architecture, away=True, of_batch=of_batch), base(architecture)
    inputs = small_models.batch()
    before = logits(model, **inputs)
    for place in places(model):

        def hook(_: nn.Module, args: Any, y: Tensor, layer: int = place.layer) -> Tensor:
            return by_hand(y, inputs["attention_mask"], network_of(adapted), layer, training and of_batch).float()

        model.get_submodule(place.module).register_forward_hook(hook)
    want = logits(model, **inputs)
    assert (want - before).abs().max() > 1e-3
    assert torch.allclose(logits(adapted.train(training), **inputs), want, atol=1e-5)


def test_the_weight_that_makes_all_adapters_has_length_one() -> None:
    network = network_of(prepared("bert", away=True))
    every = torch.stack([network.up(row.unsqueeze(0))[0] for row in torch.eye(3)])
    assert float(every.detach().square().sum()) == pytest.approx(1, rel=1e-5)


def test_the_size_of_the_factors_does_not_matter() -> None:
    model = prepared("bert", away=True)
    before = small_models.logits(model)
    network_of(model).left.data *= 10
    network_of(model).right.data *= 0.03
    assert torch.allclose(small_models.logits(model), before, atol=1e-6)


def test_down_is_up_transposed() -> None:
    """What U^T cannot see passes as it is; what it sees does not."""
    network = network_of(prepared("bert", away=True))
    network.context = False
    up = network.up(network.embedding(torch.zeros(1, 1, 16), 0))[0]
    outside = torch.linalg.svd(up).U[:, 4:]
    adapter = MadeAdapter(network, 0)
    assert torch.allclose(adapter(outside.T.unsqueeze(0)), outside.T.unsqueeze(0), atol=1e-6)
    assert not torch.allclose(adapter(up.T.unsqueeze(0)), up.T.unsqueeze(0), atol=1e-3)


def test_every_parameter_but_the_shares_gets_a_gradient() -> None:
    model = prepared("bert").train()
    model(**small_models.batch()).logits.sum().backward()
    for name in NAMES:
        gradient = model.get_parameter(f"hypernetwork.{name}").grad
        if name == "class_shares":
            assert gradient is None
        else:
            assert gradient is not None
            assert gradient.any()


# Batch-mates and padding.


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_a_prediction_depends_on_no_batch_mate_and_no_padding(architecture: str) -> None:
    model, inputs = prepared(architecture, away=True), small_models.batch()
    model.eval()
    together = logits(model, **inputs)
    for b in range(4):
        length = int(inputs["attention_mask"][b].sum())
        alone = logits(model, **{name: value[b : b + 1, :length] for name, value in inputs.items()})
        assert torch.allclose(alone[0], together[b], atol=1e-6)
    assert torch.allclose(logits(model, **{n: v[[3, 1]] for n, v in inputs.items()}), together[[3, 1]], atol=1e-6)
    moved = (together - small_models.logits(base(architecture))).abs().max()
    assert moved > 1e-3, "the adapters do something"


@pytest.mark.parametrize("of_batch", [False, True])
def test_in_training_the_context_is_of_the_batch_if_asked_and_padding_does_not_count(of_batch: bool) -> None:
    model, inputs = prepared("bert", away=True, of_batch=of_batch).train(), small_models.batch()
    together = logits(model, **inputs)
    alone = logits(model, **{name: value[:1] for name, value in inputs.items()})
    assert torch.allclose(alone[0], together[0], atol=1e-4) is not of_batch
    longer = {name: nn.functional.pad(value, (0, 4)) for name, value in inputs.items()}
    longer["input_ids"][:, 9:] = 17
    assert torch.allclose(logits(model, **longer), together, atol=1e-6)


def test_without_a_mask_every_token_counts() -> None:
    model = prepared("bert", away=True)
    ids = small_models.batch()["input_ids"]
    masked = logits(model, input_ids=ids, attention_mask=torch.ones_like(ids))
    assert torch.allclose(logits(model, input_ids=ids), masked, atol=1e-6)


def test_a_mask_is_found_by_its_place_too() -> None:
    model, inputs = prepared("bert", away=True), small_models.batch()
    with torch.no_grad():
        by_place = model(inputs["input_ids"], inputs["attention_mask"]).logits
    assert torch.equal(by_place, logits(model, **inputs))


def test_a_mask_serves_one_pass_even_one_that_fails() -> None:
    model, inputs = prepared("bert"), small_models.batch()
    logits(model, **inputs)
    assert network_of(model).mask is None
    with pytest.raises(IndexError):
        model(input_ids=inputs["input_ids"] + 1000, attention_mask=inputs["attention_mask"])
    assert network_of(model).mask is None


def test_a_mask_that_says_nothing_of_tokens_is_refused() -> None:
    ids = small_models.batch()["input_ids"]
    with pytest.raises(MethodError, match=r"shape \(batch, tokens\)"):
        prepared("bert")(input_ids=ids, attention_mask=torch.ones(4, 1, 9, 9))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_model_of_language_does_not_see_what_it_is_to_predict(kind: str, training: bool) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model: nn.Module = (
        LlamaForCausalLM(LlamaConfig(vocab_size=40, **shape, num_key_value_heads=2))
        if kind == "llama"
        else GPT2LMHeadModel(
            GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        )
    )
    before = model.eval()(torch.arange(9).unsqueeze(0)).logits
    SMALL.inject(model, [], 0)
    ids = torch.arange(9).unsqueeze(0)
    other = ids.clone()
    other[0, 5:] = 30
    model.train(training)
    assert torch.allclose(logits(model, input_ids=ids)[:, :5], logits(model, input_ids=other)[:, :5], atol=1e-6)
    assert not torch.allclose(logits(model, input_ids=ids), before, atol=1e-5)


# In the model.


@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_numbers_put_in_are_those_counted(architecture: str) -> None:
    model = prepared(architecture)
    head = small_models.head_of(small_models.make(architecture))
    free = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    own = {name: parameter.numel() for name, parameter in free.items() if name not in head}
    assert set(own) == {f"hypernetwork.{name}" for name in NAMES} - {SHARES}
    assert set(free) == {*own, *head}
    assert (
        sum(own.values()) == counts.hypernetwork(SMALL, 16, 2, 3) == 5 * (16 + 12) + (16 + 1) * 3 + (3 + 1) * 3 + 2 * 3
    )


def test_the_start_is_a_small_change_and_depends_on_the_seed_alone() -> None:
    model = small_models.make("bert")
    before, head = small_models.logits(model), small_models.head_of(model)
    frozen = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(11)
    random_state = torch.random.get_rng_state()
    names = Hypernetworks().inject(model, head, 7)
    assert torch.equal(torch.random.get_rng_state(), random_state)
    change = (small_models.logits(model) - before).abs().max()
    assert 0 < change < 0.05 * before.abs().max()
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in frozen.items())
    assert torch.equal(model.get_parameter(SHARES), torch.full((3,), 1 / 3))
    again, other = small_models.make("bert"), small_models.make("bert")
    Hypernetworks().inject(again, head, 7)
    Hypernetworks().inject(other, head, 8)
    assert read(model, names).to_bytes() == read(again, names).to_bytes() != read(other, names).to_bytes()


def test_a_copy_makes_adapters_by_a_network_of_its_own() -> None:
    model = prepared("bert", away=True)
    before = small_models.logits(model)
    other = copy.deepcopy(model)
    assert torch.equal(small_models.logits(other), before)
    network_of(other).layer.data += 1
    assert not torch.allclose(small_models.logits(other), before, atol=1e-4)
    assert torch.equal(small_models.logits(model), before)
    assert len(list(other.named_parameters())) == len(list(model.named_parameters()))
    assert [name for name in model.state_dict() if name.endswith(".left")] == ["hypernetwork.left"]


def test_tensors_given_for_one_call_reach_every_place() -> None:
    model = prepared("bert", away=True)
    objective = Objective(model, classification.loss, torch.device("cpu"))
    objective.eval()
    batch = {**small_models.batch(), "labels": torch.tensor([0, 1, 2, 0])}
    moved = read(model, [f"hypernetwork.{name}" for name in NAMES]) * 1.5
    before = objective.losses({}, batch)
    given = objective.losses(moved.parts(), batch)
    assert torch.equal(objective.losses({}, batch), before)
    objective.load(moved)
    objective.eval()
    assert torch.equal(objective.losses({}, batch), given)
    assert not torch.allclose(given, before, atol=1e-4)


def test_beside_a_model_in_bfloat16_the_network_stays_in_float32() -> None:
    model = small_models.make("roberta").to(torch.bfloat16)
    names = SMALL.inject(model, small_models.head_of(model), 0)
    assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
    assert small_models.logits(model).dtype == torch.bfloat16


def test_a_model_without_numbers_gets_a_network_without_numbers() -> None:
    with torch.device("meta"):
        model = small_models.ARCHITECTURES["distilbert"]()
        names = SMALL.inject(model, small_models.head_of(model), 0)
    assert all(model.get_parameter(name).is_meta for name in names)
    assert read(model, names).numel == counts.hypernetwork(SMALL, 16, 2, 3) + 3


def test_a_model_of_ones_own_and_a_second_adapter_are_refused() -> None:
    with pytest.raises(MethodError, match="no attention and feed-forward blocks are known in Toy"):
        SMALL.inject(toys.model(), [], 0)
    with pytest.raises(MethodError, match="already has an adapter"):
        SMALL.inject(prepared("bert"), [], 0)


@every(
    ("labels", "want"),
    [
        ([0, 1, 1, 2], [0.25, 0.5, 0.25]),
        ([np.int64(2), torch.tensor(2)], [0, 0, 1]),
        ([], [1 / 3] * 3),
        ([None, None], [1 / 3] * 3),
        ([0, None], [1 / 3] * 3),
        ([[0, 1], [2]], [1 / 3] * 3),
        ([np.array([0, 1]), np.array([2])], [1 / 3] * 3),
        ([torch.tensor([0]), torch.tensor([1])], [1 / 3] * 3),
        ([0.5, 1.0], [1 / 3] * 3),
        ([torch.tensor(1.0)], [1 / 3] * 3),
        ([0, 3], [1 / 3] * 3),
        ([-100, 1], [1 / 3] * 3),
        (["asthma", "sepsis"], [1 / 3] * 3),
    ],
)
def test_shares_of_labels(labels: list[Any], want: list[float]) -> None:
    found = shares(labels, 3)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(want)
