"""Per-example gradients of every method's adapter on every architecture, against plain autograd on every example.

The methods on LoRA that differ in the mean alone: `tests/secure_fed/test_per_example.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.virtual_tokens import EncodedPromptTokens
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Method, State
from tests.cells import chosen
from tests.secure_fed import small_models
from tests.secure_fed.adapters.test_every_adapter import Tied
from tests.secure_fed.example_gradients import one_by_one, path_for, together
from tests.secure_fed.methods.rounds import method_of
from tests.secure_fed.test_per_example import CPU, check, made, placed, texts

NAMES = (
    *("fedft", "bitfit", "adapter_houlsby", "adapter_pfeiffer", "ia3", "compacter", "prompt_tuning", "prefix_tuning"),
    *("p_tuning", "rolora", "federa", "svd_adaptation", "fedtt"),
)
WITHOUT_CACHE = ("distilbert", "deberta", "deberta_v3")
CELLS = [
    (name, architecture)
    for name in NAMES
    for architecture in small_models.ARCHITECTURES
    if (name, architecture) != ("bitfit", "llama") and not (name == "prefix_tuning" and architecture in WITHOUT_CACHE)
]
QUICK = [  # every method, every architecture, and either path
    *(("fedft", "roberta"), ("bitfit", "deberta"), ("bitfit", "bert"), ("ia3", "deberta_v3"), ("compacter", "gpt2")),
    *(("adapter_houlsby", "distilbert"), ("adapter_pfeiffer", "llama"), ("prompt_tuning", "deberta_v3")),
    *(("prefix_tuning", "gpt2"), ("p_tuning", "bert"), ("rolora", "gpt2"), ("federa", "bert")),
    *(("svd_adaptation", "llama"), ("svd_adaptation", "deberta_v3"), ("fedtt", "bert")),
]


def slow(name: str, architecture: str) -> bool:
    """Whether per-example gradients need one pass per example, as the batched path would be wrong."""
    if name == "fedft":  # position embeddings have no batch dimension
        return architecture not in ("roberta", "llama")
    if name == "bitfit":  # DeBERTa's own LayerNorm and biases, and positions that examples share
        return architecture in ("deberta", "deberta_v3")
    # Keys or queries of relative positions, which examples share.
    return name in ("ia3", "rolora", "federa", "svd_adaptation") and architecture == "deberta_v3"


def ready(
    name: str, architecture: str, round_: int = 0, method: Method | None = None
) -> tuple[nn.Module, tuple[str, ...]]:
    """A model with the adapter, in float64, and the names of what trains in the round."""
    model, method = made(architecture), method or method_of(name)
    state = State(method.prepare(model, small_models.head_of(model), 0), round_)
    return model.double(), method.plan(state).trainable


@pytest.mark.parametrize(("name", "architecture"), chosen(CELLS, QUICK))
def test_the_path_taken_is_right_for_every_architecture(name: str, architecture: str) -> None:
    model, expected = ready(name, architecture)
    assert check(model, expected, texts()) is (one_by_one if slow(name, architecture) else together)


@pytest.mark.parametrize("architecture", chosen(["bert", "llama", "gpt2"], ["gpt2"]))
def test_where_a_alone_trains(architecture: str) -> None:
    """Beside B = 0 it would have no gradient."""
    model, names = ready("rolora", architecture, 1)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            parameter.data += 0.1
    assert not any(".lora_B." in name for name in names)
    assert check(model, names, texts()) is together


def test_an_lstm_has_its_gradients_made_one_at_a_time() -> None:
    method = Averaged(EncodedPromptTokens(3, network="LSTM"), method_of("p_tuning").card)
    model, names = ready("", "bert", method=method)
    assert path_for(Objective(model, classification.loss, CPU), Collate(0), placed(model, names), texts()) is one_by_one


def test_tied_embeddings_have_the_gradients_of_both_layers() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    names = tuple(method_of("fedft").prepare(model, [], 0))
    items = [{"ids": ids, "labels": int(ids[0])} for ids in torch.randint(9, (5, 4))]
    assert check(model, names, items, default_collate) is together


@pytest.mark.parametrize("away", [False, True])
def test_experts_drawn_at_random_do_not_pass_for_examples_that_are_coupled(away: bool) -> None:
    """`path_for` raises no ModelError, neither with identical experts, as in the first round, nor with different ones.

    Gradients are computed one example at a time, so that each example has its own draw.
    """
    model, names = ready("adamix", "bert")
    method: Any = method_of("adamix")
    objective, where = Objective(model, method.objective(classification.loss), CPU), placed(model, names)
    begun = Placed(where.start, {name: where.start[name].clone().requires_grad_() for name in names}, {})
    assert path_for(objective, Collate(0), where if away else begun, texts()) is one_by_one
    assert objective.training
