"""The methods that average a whole adapter: the tensors sent, a round by hand, per-example gradients, and whole runs."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from secure_fed.config import RunConfig
from secure_fed.errors import MethodError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.triplet import TripletAdapter, triplets
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.methods import METHODS, card
from secure_fed.methods.method import CHANGE, State
from secure_fed.rounds.transport import Recording
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.secure_fed import small_models, toys
from tests.secure_fed.adapters.test_parameters import Tied
from tests.secure_fed.example_gradients import one_by_one, path_for, together
from tests.secure_fed.methods.learning import assert_learns
from tests.secure_fed.methods.rounds import HEAD_PREFIXES, means_of, method_of, start, trained
from tests.secure_fed.test_per_example import CPU, check, made, placed, texts

OURS = ("fedft", "head", "bitfit", "adapter_houlsby", "adapter_pfeiffer", "ia3", "compacter", "adamix")
PLACED = OURS[3:]
# Parts of the names of the tensors that train, and so are sent, besides BERT's head.
PARTS = {
    "fedft": {""},
    "head": set(),
    "bitfit": {".bias"},
    "adapter_houlsby": {"adapter.down", "adapter.up"},
    "adapter_pfeiffer": {"adapter.down", "adapter.up"},
    "ia3": {"adapter.weight"},
    "compacter": {"kronecker_rule.weight", "adapter.down_", "adapter.up_"},
    "adamix": {"adapter.downs.", "adapter.up"},
}
HEAD = {"classifier.weight", "classifier.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"}


@pytest.mark.parametrize("name", OURS)
def test_what_travels_is_the_adapter_and_the_head_both_ways(name: str) -> None:
    method = method_of(name)
    state = start(method)
    plan = method.plan(state)
    assert set(plan.trainable) == set(plan.down) == set(state.tensors)
    assert method.layout(state, CHANGE) == Layout.of(state.tensors)
    own = set(state.tensors) - HEAD
    assert set(state.tensors) >= HEAD
    assert all(any(part in tensor for part in PARTS[name]) for tensor in own)
    assert all(any(part in tensor for tensor in own) for part in PARTS[name])
    places = {tensor.partition(".adapter.")[0] for tensor in own if ".adapter." in tensor}
    assert len(places) == {"fedft": 0, "head": 0, "bitfit": 0, "adapter_houlsby": 4, "compacter": 4, "ia3": 8}.get(
        name, 2
    )


@pytest.mark.parametrize("name", OURS)
def test_a_round_by_hand(name: str) -> None:
    """A mean with weights 1/2, 1/4, 1/4."""
    method = method_of(name)
    state = start(method)
    afters = [trained(method, state, seed) for seed in range(3)]
    changes = [method.contribute(CHANGE, state.tensors, after, {}) for after in afters]
    found = method.apply(state, {CHANGE: changes[0] * 0.5 + changes[1] * 0.25 + changes[2] * 0.25})
    assert found.round == 1
    for tensor in state.tensors:
        expected = sum(w * after.tensor(tensor).double() for w, after in zip((0.5, 0.25, 0.25), afters, strict=True))
        torch.testing.assert_close(found.tensors.tensor(tensor).double(), expected, rtol=1e-5, atol=1e-6)


def test_compacters_mean_is_not_that_of_its_matrices() -> None:
    def matrix(tensors: Tensors) -> np.ndarray:
        at = "bert.encoder.layer.0.output.dense.adapter.down"
        a, s, t = (
            tensors.tensor(name).numpy()
            for name in ("kronecker_rule.weight", f"{at}_left.weight", f"{at}_right.weight")
        )
        return sum(np.kron(a[i], np.outer(s[i], t[i])) for i in range(len(a)))

    method = method_of("compacter")
    state = start(method)
    afters = [trained(method, state, seed, 0.5) for seed in range(2)]
    changes = [method.contribute(CHANGE, state.tensors, after, {}) for after in afters]
    found = matrix(method.apply(state, {CHANGE: (changes[0] + changes[1]) * 0.5}).tensors)
    assert not np.allclose(found, sum(map(matrix, afters)) / 2, atol=1e-2)
    assert not card("compacter").mean_exact
    assert all(card(name).mean_exact for name in OURS if name != "compacter")


def test_they_stand_in_the_table_in_order() -> None:
    assert [name for name in METHODS if name in OURS] == list(OURS)


# Per-example gradients.


def slow(name: str, architecture: str) -> bool:
    """Whether per-example gradients need one pass per example, as the batched path would be wrong."""
    if name == "fedft":  # position embeddings have no batch dimension
        return architecture not in ("roberta", "llama")
    if name == "bitfit":  # DeBERTa's own LayerNorm and biases, and positions that examples share
        return architecture in ("deberta", "deberta_v3")
    return name == "ia3" and architecture == "deberta_v3"  # keys of relative positions, which examples share


CELLS = [(name, architecture) for name in OURS[:-1] for architecture in small_models.ARCHITECTURES]
QUICK = [  # every method, every architecture, and either path
    *(("fedft", "roberta"), ("bitfit", "deberta"), ("bitfit", "bert"), ("ia3", "deberta_v3"), ("compacter", "gpt2")),
    *(("adapter_houlsby", "distilbert"), ("adapter_pfeiffer", "llama")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture"), chosen((pair for pair in CELLS if pair != ("bitfit", "llama")), QUICK)
)
def test_the_path_taken_is_right_for_every_architecture(name: str, architecture: str) -> None:
    model, expected = ready(name, architecture)
    assert check(model, expected, texts()) is (one_by_one if slow(name, architecture) else together)


def ready(name: str, architecture: str) -> tuple[nn.Module, tuple[str, ...]]:
    model = made(architecture)
    names = tuple(method_of(name).prepare(model, small_models.head_of(model), 0))
    return model.double(), names


def test_bitfit_of_a_model_without_biases_is_refused() -> None:
    with pytest.raises(MethodError, match="no biases"):
        ready("bitfit", "llama")


@pytest.mark.parametrize("name", PLACED)
def test_a_module_without_known_blocks_is_refused(name: str) -> None:
    with pytest.raises(MethodError, match="choose a method on LoRA"):
        toys.federation({"method.name": name, "method.rank": 8})


def test_tied_embeddings_have_the_gradients_of_both_layers() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    names = tuple(method_of("fedft").prepare(model, [], 0))
    items = [{"ids": ids, "labels": int(ids[0])} for ids in torch.randint(9, (5, 4))]
    assert check(model, names, items, default_collate) is together


def test_embeddings_with_padding_by_the_quick_path() -> None:
    """All of RoBERTa's embeddings get a batch dimension; the padding token's row has no gradient."""
    model, names = ready("fedft", "roberta")
    objective, where = Objective(model, classification.loss, CPU), placed(model, names)
    assert path_for(objective, Collate(0), where, texts()) is together
    found = together(objective, Collate(0), where, texts())["roberta.embeddings.word_embeddings.weight"]
    assert found.shape == (5, small_models.VOCABULARY, 16)
    for gradient, item in zip(found, texts(), strict=True):
        assert set(gradient.any(1).nonzero().flatten().tolist()) == set(item["input_ids"].tolist())


# Federations.


def clinics() -> list[list[dict[str, Any]]]:
    """Texts whose first and last words encode the label, since encoders read the first position and decoders the last."""
    rng = np.random.default_rng(0)

    def text() -> dict[str, Any]:
        label = int(rng.integers(small_models.LABELS))
        words = rng.integers(5, small_models.VOCABULARY, rng.integers(4, 9))
        return {"input_ids": np.concatenate([[2 + label], words, [2 + label]]), "labels": label}

    return [[text() for _ in range(size)] for size in (8, 12, 10, 60)]


def federation(name: str, architecture: str = "bert", **settings: Any) -> Federation:
    *train, test = clinics()
    values = {
        "method.name": name,
        **({"method.bottleneck": 4} if "bottleneck" in card(name).options else {}),
        "federation.rounds": 3,
        "training.steps": 3,
        "training.batch_size": 8,
        "training.lr": 0.01,
        "training.together": 1,  # trials of passes over several clients would run for each model
        **{key.replace("__", "."): value for key, value in settings.items()},
    }
    config = RunConfig().replace({tuple(key.split(".", 1)): value for key, value in values.items()})  # type: ignore[misc]
    return Federation(config, model=small_models.make(architecture), train=train, test=test)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "architecture"),
    chosen(
        [*((name, "bert") for name in OURS), ("compacter", "gpt2"), ("ia3", "distilbert")],
        [("compacter", "gpt2"), ("ia3", "distilbert"), ("bitfit", "bert"), ("adapter_houlsby", "bert")],
    ),
)
def test_a_federation_learns_and_moves_nothing_else(name: str, architecture: str) -> None:
    found = federation(name, architecture)
    frozen = {
        n: p.detach().clone()
        for n, p in found.assembly.problem.model.named_parameters()
        if n not in found.assembly.initial.tensors
    }
    result = found.run()
    losses = [record["loss"] for record in result.records]
    assert losses[-1] < losses[0] < 1.2
    assert bool(frozen) == (name != "fedft")
    assert all(torch.equal(found.assembly.problem.model.get_parameter(n), p) for n, p in frozen.items())
    end, begun = result.state.tensors, found.assembly.initial.tensors
    still = {name for name in end if torch.equal(end.tensor(name), begun.tensor(name))}
    assert not still, "every tensor of the adapter and the head has learned"


def test_the_experts_drawn_are_the_same_in_every_run() -> None:
    def run(seed: int) -> Tensors:
        found = federation("adamix", federation__rounds=1, federation__seed=seed)
        before = torch.get_rng_state()
        tensors = found.run().state.tensors
        assert torch.equal(torch.get_rng_state(), before)
        return tensors

    first = run(0)
    assert toys.same(first, run(0))
    assert not toys.same(first, run(1))


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("unit", "name"),
    chosen(
        itertools.product(["client", "example"], OURS),
        [("client", "adapter_houlsby")],
    ),
)
def test_a_private_federation(name: str, unit: str) -> None:
    """Noise changes every tensor that is sent, in nearly all coordinates, from the first round on."""
    found = federation(
        name, federation__rounds=1, privacy__unit=unit, privacy__noise_multiplier=1.0, privacy__delta=1e-3
    )
    found.assembly = replace(found.assembly, transport=Recording(found.assembly.transport))
    result = found.run()
    assert unit in card(name).units
    assert result.state.tensors.is_finite()
    moved = result.state.tensors - found.assembly.initial.tensors
    assert all(moved.tensor(n).ne(0).float().mean() > 0.95 for n in moved)
    assert {Layout.of(reply.contribution).digest for _, reply in found.assembly.transport.exchanges} == {
        found.assembly.method.layout(State(found.assembly.initial.tensors), CHANGE).digest
    }


PRIVACY: dict[str, dict[str, Any]] = {
    "none": {},
    "example": {"privacy.unit": "example", "privacy.noise_multiplier": 0.3, "privacy.delta": 1e-3},
    "client": {"privacy.unit": "client", "privacy.noise_multiplier": 0.02, "privacy.delta": 1e-3},
    "masks": {"secure_aggregation.enabled": True},
    "momentum": {"federation.server_optimizer": "momentum", "federation.server_lr": 0.5},
}


def test_everything_trains_and_travels() -> None:
    method: Any = method_of("svd_adaptation", rslora=True)
    assert method.adapter == TripletAdapter(LoraAdapter(3, 6.0, True))
    state = start(method)
    own = {name for triplet in triplets(state.tensors) for name in triplet[1:]}
    assert set(state.tensors) == own | {name for name in state.tensors if name.startswith(HEAD_PREFIXES)}
    plan = method.plan(state)
    assert set(plan.trainable) == set(plan.down) == set(state.tensors)
    assert plan.passes == (CHANGE,)


def test_a_round_of_triplets_by_hand() -> None:
    """Each factor is the mean of the clients' factors; their product is not the mean of the clients' products."""
    method = method_of("svd_adaptation")
    state = start(method)
    afters = [trained(method, state, client) for client in range(3)]
    found = method.apply(state, means_of(method, state, afters)).tensors
    for name in found:
        want = sum(after.tensor(name).double() for after in afters) / 3
        torch.testing.assert_close(found.tensor(name).double(), want, atol=1e-6, rtol=0)
    for _, a, e, b in triplets(found):
        product = found.tensor(b) * found.tensor(e) @ found.tensor(a)
        products = [after.tensor(b) * after.tensor(e) @ after.tensor(a) for after in afters]
        assert (product - sum(products) / 3).norm() > 0.1 * product.norm()
    assert not method.card.mean_exact


@pytest.mark.parametrize("privacy", chosen(PRIVACY, ["none", "client"]))
def test_a_run_learns(privacy: str) -> None:
    run = assert_learns({"method.name": "svd_adaptation", "training.lr": 0.05, **PRIVACY[privacy]})
    assert all(run.state.tensors.tensor(triplet.e).any() for triplet in triplets(run.state.tensors))


def test_as_lora_has_the_product() -> None:
    method: Any = method_of("svd_adaptation")
    state = start(method)
    after = trained(method, state, 1)
    form = method.as_lora(state.tensors, state.tensors | after)
    assert form.adapter == LoraAdapter(3, 6.0)
    for module, a, e, b in triplets(after):
        factor_a, factor_b = form.factors[module]
        want = after.tensor(b) @ torch.diag(after.tensor(e)) @ after.tensor(a)
        torch.testing.assert_close(factor_b @ factor_a, want)
