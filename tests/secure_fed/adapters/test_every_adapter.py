"""The contract of every adapter: its parameters by formula, the start, what trains, copies, precision and refusals."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.hypernetwork import SHARES, Hypernetworks
from secure_fed.learning.models.adapters.inserted import Bottlenecks, Compacters, Mixtures, Scales
from secure_fed.learning.models.adapters.lora import LoraAdapter, matrix_shape, pairs
from secure_fed.learning.models.adapters.parameters import Biases, Everything, HeadAlone, read
from secure_fed.learning.models.adapters.tensor_train import TensorTrains, core_shapes, factorisation
from secure_fed.learning.models.adapters.triplet import TripletAdapter, triplets
from secure_fed.learning.models.adapters.virtual_tokens import EncodedPromptTokens, Prefix, PromptTokens
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Layout
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.adapters.behind import adapted, counted, shake
from tests.secure_fed.adapters.virtual import made
from tests.secure_fed.example_gradients import losses_at

BOTH = ("attention", "feed_forward")
ADAPTERS: dict[str, Any] = {
    "everything": Everything(),
    "biases": Biases(),
    "houlsby": Bottlenecks(4, BOTH),
    "pfeiffer": Bottlenecks(4, ("feed_forward",), "relu"),
    "compacter": Compacters(4, 2),
    "adamix": Mixtures(4, 3),
    "ia3": Scales(),
    "lora": LoraAdapter(rank=3),
    "singular": LoraAdapter(rank=3, alpha=3.0, start="singular"),
    "triplet": TripletAdapter(LoraAdapter(rank=3, alpha=6.0)),
    "tensor train": TensorTrains(rank=3, bottleneck=4),
    "hypernetwork": Hypernetworks(context_dim=3, bottleneck=4, hyper_dim=5),
    "prompt": PromptTokens(3),
    "mlp": EncodedPromptTokens(3),
    "lstm": EncodedPromptTokens(3, network="LSTM"),
    "prefix": Prefix(3),
    "projected": Prefix(3, projected=True),
}
NOT_DRAWN = ("everything", "biases", "ia3", "singular")
CHANGING = ("hypernetwork", "prompt", "mlp", "lstm", "prefix", "projected")  # the model computes something else at once
WITHOUT_CACHE = ("distilbert", "deberta", "deberta_v3")


def matrices(names: list[str], architecture: str) -> list[tuple[int, int]]:
    model = small_models.make(architecture)
    found = pairs(names) or triplets(names)
    return [matrix_shape(model.get_submodule(one.module)) for one in found]


def trains(names: list[str], architecture: str) -> int:
    """r k_1 + r^2 (k_2 + .. + k_(J-1)) + r k_J for each train over k_1 .. k_J, and the adapters' biases."""
    square = architecture not in ("llama", "gpt2")
    return 4 * (4 + 16) + sum(
        math.prod(shape)
        for m, n in [*[(16, 4), (4, 16)] * 4, *[(16, 16)] * square]
        for shape in core_shapes(factorisation(m, n).shape, 3)
    )


def sizes(architecture: str, ending: str) -> int:
    named = small_models.make(architecture).named_parameters()
    return sum(parameter.numel() for name, parameter in named if name.endswith(ending))


SCALES = {"llama": 8 + 8 + 24, "distilbert": 16 + 16 + 24, "gpt2": 48 + 64, "deberta": 48 + 16 + 24}  # of one layer


def prefixes(names: list[str], architecture: str) -> int:
    """2 p L H for L layers; four of Llama's heads share two heads' keys."""
    return 3 * 2 * 2 * (8 if architecture == "llama" else 16)


def projected(names: list[str], architecture: str) -> int:
    width = 8 if architecture == "llama" else 16
    return 3 * width + width * (width + 1) + (width + 1) * 2 * 2 * width


# The number of parameters in a model of two layers of width 16.
COUNTS: dict[str, Callable[[list[str], str], int]] = {
    "everything": lambda names, architecture: sizes(architecture, ""),
    "biases": lambda names, architecture: sizes(architecture, "bias"),
    "ia3": lambda names, architecture: 2 * SCALES.get(architecture, 16 + 16 + 16 + 24),
    "houlsby": lambda names, architecture: 4 * (2 * 4 * 16 + 4 + 16),
    "pfeiffer": lambda names, architecture: 2 * (2 * 4 * 16 + 4 + 16),
    "compacter": lambda names, architecture: 2**3 + 4 * 3 * (4 + 16),
    "adamix": lambda names, architecture: 2 * (3 * (4 * 16 + 4) + 4 * 16 + 16),
    "lora": lambda names, architecture: sum(3 * (m + n) for m, n in matrices(names, architecture)),
    "singular": lambda names, architecture: sum(3 * (m + n) for m, n in matrices(names, architecture)),
    "triplet": lambda names, architecture: sum(3 * (m + n + 1) for m, n in matrices(names, architecture)),
    "tensor train": trains,
    "hypernetwork": lambda names, architecture: 5 * (16 + 4 * 3) + 3 * (3 + 16 + 2) + 2 * 3 + 3,  # and the shares
    "prompt": lambda names, architecture: 3 * 16,
    "mlp": lambda names, architecture: 3 * 16 + 3 * (16 * 16 + 16),
    "lstm": lambda names, architecture: 3 * 16 + 8 * 16 * (32 + 48 + 4) + (64 * 16 + 32) + (32 * 16 + 16),
    "prefix": prefixes,
    "projected": projected,
}


@pytest.mark.parametrize("architecture", chosen(small_models.ARCHITECTURES, ["bert", "distilbert", "deberta", "gpt2"]))
@every("name", ADAPTERS)
def test_it_adds_what_it_names_and_nothing_else_changes(name: str, architecture: str) -> None:
    """The model keeps its names and numbers, and computes what it did; the adapter and the head train, and have an effect."""
    if (name in ("prefix", "projected") and architecture in WITHOUT_CACHE) or (name, architecture) == (
        "biases",
        "llama",
    ):
        return  # refused: `test_prompts.py`, and below
    model = made(architecture).float()
    before, head = small_models.logits(model), small_models.head_of(model)
    kept = {key: tensor.detach().clone() for key, tensor in model.named_parameters()}
    random_state = torch.random.get_rng_state()
    names = list(ADAPTERS[name].inject(model, head, 0))
    assert torch.equal(torch.random.get_rng_state(), random_state)
    if name in COUNTS:
        assert sum(model.get_parameter(key).numel() for key in names) == COUNTS[name](names, architecture)
    if name not in ("lora", "singular"):  # PEFT wraps the layers
        assert {key for key, _ in model.named_parameters()} == {*kept, *names}
        assert all(torch.equal(model.get_parameter(key), tensor) for key, tensor in kept.items())
    after, exact = small_models.logits(model), name != "singular"
    assert (torch.equal(after, before) if exact else torch.allclose(after, before, atol=1e-4)) == (name not in CHANGING)
    square = {f"{key.partition('.tensor_train')[0]}.weight" for key in names if ".tensor_train.core_0" in key}
    free = {key for key, parameter in model.named_parameters() if parameter.requires_grad}
    assert free == {*names, *head} - square - {SHARES}
    shake(model, names)
    assert not torch.allclose(small_models.logits(model), after, atol=1e-4)


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> Any:
    return ADAPTERS[request.param]


def test_the_start_is_a_function_of_the_seed_alone_on_any_default_device(adapter: Any) -> None:
    def drawn(global_seed: int, seed: int, device: str = "cpu") -> bytes:
        model = small_models.make("bert")
        torch.manual_seed(global_seed)
        with torch.device(device):
            names = adapter.inject(model, small_models.head_of(model), seed)
        return read(model, names).to_bytes()

    first = drawn(1, 5)
    assert first == drawn(
        2, 5, "meta" if adapter != ADAPTERS["singular"] else "cpu"
    )  # it decomposes weights where they are
    assert (first == drawn(1, 6)) == (adapter in [ADAPTERS[name] for name in NOT_DRAWN])


def test_a_model_without_numbers_gets_shapes(adapter: Any) -> None:
    usual = small_models.make("bert")
    with torch.device("meta"):
        empty = small_models.ARCHITECTURES["bert"]()
        names = adapter.inject(empty, small_models.head_of(empty), 5)
    expected = read(usual, adapter.inject(usual, small_models.head_of(usual), 5))
    assert Layout.of(read(empty, names)) == Layout.of(expected)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_adapters_of_a_bfloat16_model_are_float32(adapter: Any) -> None:
    if isinstance(adapter, Everything | Biases):  # the model's own
        return
    model = small_models.make("bert").to(torch.bfloat16)
    names = adapter.inject(model, small_models.head_of(model), 0)
    assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
    shake(model, names)
    assert small_models.logits(model).dtype == torch.bfloat16


def test_a_copy_of_the_model_uses_its_own_adapters(adapter: Any) -> None:
    model = small_models.make("bert")
    names = list(adapter.inject(model, small_models.head_of(model), 0))
    shake(model, names)
    before, other = small_models.logits(model), copy.deepcopy(model)
    assert torch.equal(small_models.logits(other), before)
    shake(other, names, seed=12)
    assert torch.equal(small_models.logits(model), before)
    assert not torch.equal(small_models.logits(other), before)


def test_tensors_given_to_the_objective_take_the_place_of_the_models(adapter: Any) -> None:
    model, names = adapted("bert", adapter)
    moved = copy.deepcopy(model)
    shake(moved, names, seed=12)
    batch = {**small_models.batch(), "labels": torch.tensor([0, 1, 2, 0])}
    objective = Objective(model, classification.loss, torch.device("cpu"))
    objective.eval()
    found = losses_at(objective, {name: moved.get_parameter(name) for name in names}, batch)
    torch.testing.assert_close(found, classification.loss(moved.eval(), batch))
    assert not torch.allclose(found, classification.loss(model.eval(), batch))


@pytest.mark.parametrize("name", [name for name in ADAPTERS if name not in ("everything", "biases")])
def test_a_second_adapter_and_a_model_that_can_have_none_are_refused(name: str) -> None:
    model = small_models.make("bert")
    head = small_models.head_of(model)
    ADAPTERS[name].inject(model, head, 0)
    with refused(MethodError):
        ADAPTERS[name].inject(model, head, 0)
    if name not in ("lora", "singular", "triplet"):
        with refused(MethodError):
            ADAPTERS[name].inject(toys.model(), [], 0)
    with refused(MethodError):
        ADAPTERS[name].inject(nn.Sequential(nn.Linear(4, 4)), [], 0)


@pytest.mark.parametrize(
    "kind", [LoraAdapter, lambda **more: TripletAdapter(LoraAdapter(**more))], ids=["lora", "triplet"]
)
def test_torchs_own_encoder_uses_its_adapters_when_it_evaluates(kind: Callable[..., Any]) -> None:
    """Torch's fused kernel would read the frozen weights and skip the adapters."""
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True), 2)
    names = list(kind(rank=2, target_modules="all-linear").inject(encoder, [], 0))
    assert {name.split(".")[2] for name in names} == {"linear1", "linear2"}
    shake(encoder, names)
    x = torch.randn(2, 5, 16)
    trained = encoder.train()(x)
    with torch.no_grad():
        assert torch.allclose(encoder.eval()(x), trained, atol=1e-5)


# All parameters of a model, its biases, or its head alone.


class Tied(nn.Module):
    """A model whose output layer shares its weight with the input embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.inner = nn.Linear(6, 6)
        self.score = nn.Linear(6, 9, bias=False)
        self.score.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        scores: Tensor = self.score(self.inner(self.embed(ids)).tanh().mean(1))
        return scores


def test_tied_weights_are_one() -> None:
    model = Tied()
    names = Everything().inject(model, [], 0)
    assert names == ["embed.weight", "inner.weight", "inner.bias"]
    assert counted(model, names) == 9 * 6 + 6 * 6 + 6
    assert Biases().inject(model, [], 0) == ["inner.bias"]
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["inner.bias"]


def test_a_model_without_biases_is_refused_before_it_is_touched() -> None:
    model = small_models.make("llama")
    with refused(MethodError):
        Biases().inject(model, small_models.head_of(model), 0)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_a_head_is_refused_where_the_head_alone_trains() -> None:
    model = small_models.make("bert")
    with refused(MethodError):
        HeadAlone().inject(model, [], 0)
    head = small_models.head_of(model)
    assert HeadAlone().inject(model, head, 0) == []
    assert {name for name, one in model.named_parameters() if one.requires_grad} == set(head)


@pytest.mark.parametrize("adapter", [Everything(), Biases()])
def test_numbers_that_cannot_train_are_refused(adapter: Everything | Biases) -> None:
    model = nn.Linear(3, 2)
    model.bias = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    with refused(MethodError):
        adapter.inject(model, [], 0)
