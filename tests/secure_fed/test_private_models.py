"""Models that example-level privacy refuses, each with its reason, before anything is released.

Refusals that cost nothing come first, then trials of the model, and only then is budget reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

from privacy.errors import BudgetExhausted
from privacy.ledger import Ledger
from secure_fed.config import TrainingConfig
from secure_fed.errors import MethodError, ModelError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.architecture import require_data_free_start, require_supported
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes.passes import tried
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, Placed
from secure_fed.learning.training.objective import Objective, changed, checksums
from secure_fed.learning.training.trials import require_uncoupled, short
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.private_toys import EXAMPLE, NOISE, federation

CPU = torch.device("cpu")


def trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def with_peft(**settings: Any) -> nn.Module:
    model = small_models.make("bert")
    return inject_adapter_in_model(LoraConfig(r=2, **settings), model)


# Models that are refused for their layers.


def test_adapters_without_proven_gradients_are_refused_and_others_are_not() -> None:
    for settings in (
        {"target_modules": ["query"], "use_dora": True},
        {"target_modules": ["word_embeddings"]},
        {"target_modules": ["query"], "trainable_token_indices": {"word_embeddings": [1, 2]}},
    ):
        model = with_peft(**settings)
        with refused(MethodError):
            require_supported(model, trainable(model))
    for proven in ({}, {"use_rslora": True}, {"bias": "lora_only"}, {"modules_to_save": ["classifier"]}):
        model = with_peft(target_modules=["query", "value"], **proven)
        require_supported(model, trainable(model))


def test_starts_that_read_the_data_are_refused_for_every_unit_and_others_are_not() -> None:
    model = with_peft(target_modules=["query"])
    for start in ("eva", "corda", "lora_ga"):
        model.peft_config["default"].init_lora_weights = start  # type: ignore[index, union-attr]
        with refused(MethodError):
            require_data_free_start(model)
        with refused(MethodError):
            require_supported(model, [])
    for free in (True, False, "gaussian", "pissa", "olora", "orthogonal"):
        require_data_free_start(with_peft(target_modules=["query"], init_lora_weights=free))
    require_data_free_start(small_models.make("bert"))


@pytest.mark.parametrize(("kind", "trains"), [(nn.Embedding, True), (nn.EmbeddingBag, False)])
def test_a_largest_norm_of_embeddings_is_refused_for_every_unit(kind: Callable[..., nn.Module], trains: bool) -> None:
    """The rows of the tokens that occur become shorter, without noise."""
    model = nn.Sequential(kind(9, 4, max_norm=2.0).requires_grad_(trains), nn.Linear(4, 2))
    with refused(ModelError):
        require_data_free_start(model)
    with refused(ModelError):
        require_supported(model, trainable(model))
    require_data_free_start(nn.Sequential(kind(9, 4), nn.Linear(4, 2)))


# Models that are refused after a trial pass.

Loss = Callable[[nn.Module, Any], Tensor]


def why_alone(model: nn.Module, loss: Loss, items: Sequence[Any], collate: Any) -> str:
    """The reason for computing examples one at a time, or "". Raises where the model or its loss is refused."""
    objective = Objective(model, loss, CPU)
    objective.public = items
    before = toys.weights(model).select(trainable(model))
    placed = Placed.of(before, list(before), CPU)
    require_uncoupled(objective, collate, placed, items)
    return tried(objective, [placed], short(objective, collate, placed, items[0], 3), collate).why_not


def in_batch_negatives(model: nn.Module, batch: Any) -> Tensor:
    h = model(batch["x"])
    return functional.cross_entropy(h @ h.T, torch.arange(len(h)), reduction="none")


def normalised_by_the_batch(model: nn.Module, batch: Any) -> Tensor:
    return classification.loss(model, batch) / len(batch["labels"])


def centred(model: nn.Module, batch: Any) -> Tensor:
    x = batch["x"]
    return classification.loss(model, {"x": x - x.mean(0) / 2, "labels": batch["labels"]})


def across(model: nn.Module, batch: Any) -> Tensor:
    """Attention over the batch instead of over the tokens, as when batch_first is forgotten."""
    h = model.query(batch["x"])[:, None]  # type: ignore[operator]
    mixed = functional.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).squeeze(0)
    return functional.cross_entropy(model.classifier(mixed), batch["labels"], reduction="none")  # type: ignore[operator]


def pulled(model: nn.Module, batch: Any) -> Tensor:
    """Every loss moves with the scores of the whole batch, by little."""
    return classification.loss(model, batch) + 0.05 * torch.tanh(model(batch["x"])).mean()


def test_a_loss_that_couples_examples_is_refused() -> None:
    items = toys.examples(1, 5)
    for loss in (in_batch_negatives, normalised_by_the_batch, centred, across):
        with refused(ModelError):
            why_alone(toys.model(), loss, items, default_collate)
    assert not why_alone(toys.model(), classification.loss, items, default_collate)
    items[2] = items[2] | {"x": 1e5 * items[2]["x"]}
    with refused(ModelError):  # a large loss hides no coupling
        why_alone(toys.model(), pulled, items, default_collate)
    assert not why_alone(toys.model(), classification.loss, items, default_collate)


class OwnBatchNorm(nn.Module):
    """In training mode it subtracts half the batch mean (`couples`) or stores one (`keeps`); in evaluation mode, neither."""

    mean: Tensor

    def __init__(self, keeps: bool, couples: bool) -> None:
        super().__init__()
        self.keeps, self.couples = keeps, couples
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.keeps:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return x - x.mean(0) / 2 if self.training and self.couples else x


@pytest.mark.parametrize(("keeps", "couples"), [(True, False), (False, True), (True, True), (False, False)])
def test_a_batch_norm_of_ones_own_is_refused(keeps: bool, couples: bool) -> None:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), OwnBatchNorm(keeps, couples), nn.Dropout(0.5), nn.Linear(8, 3))
    with refused(ModelError) if keeps or couples else nullcontext():
        assert not why_alone(layers, classified, toys.examples(1, 5), default_collate)
    assert layers.training
    assert not layers[1].mean.any()


class Writes(nn.Module):
    """A layer that writes to a parameter, trained or frozen, as it runs: by `copy_`, by `data`, or in the backward pass.

    once: it writes the same whatever runs later.
    """

    def __init__(self, way: str, trains: bool, once: bool = False) -> None:
        super().__init__()
        self.kept = nn.Parameter(torch.full((8,), 9.0), requires_grad=trains)
        self.way, self.once = way, once

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "backward":
            x = x.clone()
            if x.requires_grad:
                x.register_hook(self.write)
        elif self.way:
            self.write(x.detach())
        return x

    def write(self, x: Tensor) -> None:
        value = self.kept.data.clamp(max=2.0) if self.once else self.kept.data + x.mean(0)
        if self.way == "copy":
            with torch.no_grad():
                self.kept.copy_(value)
        else:
            self.kept.data[:] = value


def layers_with(layer: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 3))


def classified(model: nn.Module, batch: Any) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


@pytest.mark.parametrize(
    ("way", "once", "trains"),
    [("copy", False, True), ("data", False, False), ("backward", False, True), ("data", True, False)],
)
def test_a_layer_that_writes_to_its_parameters_is_refused(way: str, once: bool, trains: bool) -> None:
    with refused(ModelError):
        why_alone(layers_with(Writes(way, trains, once)), classified, toys.examples(1, 5), default_collate)
    assert not why_alone(layers_with(Writes("", trains)), classified, toys.examples(1, 5), default_collate)


def test_a_frozen_tensor_that_only_the_first_pass_changes_is_noticed() -> None:
    """The first pass is one that asks whether the model takes texts of a width, before the trial itself."""
    model = small_models.make("bert")
    name = next(name for name, _ in model.named_parameters() if name.endswith("embeddings.LayerNorm.weight"))

    def shorten(layer: nn.Module, given: Any) -> None:
        layer.weight.data.clamp_(max=0.9)  # type: ignore[operator, union-attr]

    own, items = ["classifier.weight", "classifier.bias"], texts(3, 5, 9)
    for writes in (False, True):
        before = toys.weights(model).select([*own, name])
        placed, objective = Placed.of(before, own, CPU), Objective(model, classification.loss, CPU)
        if writes:
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(shorten)
        with refused(ModelError) if writes else nullcontext():
            require_uncoupled(objective, Collate(0), placed, items)


def texts(*lengths: int) -> list[dict[str, Any]]:
    return [{"input_ids": np.arange(2, 2 + n), "labels": n % 3} for n in lengths]


@pytest.mark.parametrize("held", [True, False], ids=["in the state", "in the model"])
@pytest.mark.parametrize("public", [True, False])
def test_clients_that_are_protected_are_not_trained_by_a_model_that_remembers_them(public: bool, held: bool) -> None:
    """A frozen parameter would carry one client's data into the training of the next."""
    model = layers_with(Writes("data", trains=False))
    names = [name for name, one in model.named_parameters() if one.requires_grad or held]
    before = toys.weights(model).select(names)
    given = (default_collate, TrainingConfig(steps=1, batch_size=4), 0.1, np.random.default_rng(0))
    jobs = [Job(before, trainable(model), toys.examples(seed, 5), *given) for seed in (1, 2)]
    objective, ways = Objective(model, classified, CPU), Ways()
    with refused(ModelError) if public else nullcontext():
        assert len(train_together(objective, jobs, ways, public=public)) == 2
        assert held or "parameter 1.kept of the model changes as it runs" in ways.why_not


@pytest.mark.parametrize(
    "kind", [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64]
)
def test_a_checksum_changes_with_any_number(kind: torch.dtype) -> None:
    tensor = torch.ones(3, 4).to(kind).t()
    before = checksums({"a": tensor, "none": torch.zeros(0), "one": torch.tensor(1.0)})
    assert changed(before, {"a": tensor.contiguous(), "none": torch.zeros(0), "one": torch.tensor(1.0)}) == []
    for row, column in ((0, 0), (3, 2)):
        other = tensor.clone()
        other[row, column] = 0
        assert changed(before, {"a": other, "none": torch.zeros(0)}) == ["a"]
    assert changed(before, {"another": tensor}) == ["another"]


@pytest.mark.parametrize("count", [512, pytest.param(2**18 + 3, marks=pytest.mark.nightly)])
def test_a_checksum_changes_with_all_numbers_at_once(count: int) -> None:
    """Their scale, signs and order, near and far."""
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0))
    others = [2 * tensor, -tensor, tensor.flip(0), tensor.roll(1), tensor.roll(2**16), tensor.abs()]
    assert all(changed(checksums({"a": tensor}), {"a": other}) for other in others[: 4 if count == 512 else None])


def test_padding_that_counts_is_refused() -> None:
    """The model receives no attention mask."""

    def maskless(model: nn.Module, batch: Any) -> Tensor:
        return classification.loss(model, {name: value for name, value in batch.items() if name != "attention_mask"})

    model = small_models.make("bert")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # else words hardly count, and padding neither
    why_alone(model, classification.loss, texts(3, 5, 9), Collate(0))  # is not refused
    with refused(ModelError):
        why_alone(model, maskless, texts(3, 5, 9), Collate(0))


def test_random_numbers_of_a_models_own_are_no_reason_to_refuse() -> None:
    class Noisy(toys.Toy):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + torch.randn_like(x) if self.training else x)

    # A trial cannot show whether each example has its own random numbers. Computed one by one, it has.
    assert "random numbers" in why_alone(Noisy(), classification.loss, toys.examples(1, 5), default_collate)


def test_a_gradient_that_couples_where_the_loss_does_not_goes_one_by_one() -> None:
    """x - mean + mean equals x, but with one mean detached its gradient depends on the batch."""

    def sly(model: nn.Module, batch: Any) -> Tensor:
        h = model.value(model.query(batch["x"]).tanh())  # type: ignore[operator]
        scores = model.classifier(h - h.mean(0) + h.mean(0).detach())  # type: ignore[operator]
        return functional.cross_entropy(scores, batch["labels"], reduction="none")

    assert "not those of" in why_alone(toys.model(), sly, toys.examples(1, 5), default_collate)


def causal(batch_mean: bool) -> Loss:
    """The mean loss of an example's tokens; for `batch_mean`, wrongly, its share of the mean over all tokens of the batch."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        shown = batch["attention_mask"][:, 1:]
        scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].transpose(1, 2)
        tokens = functional.cross_entropy(scores, batch["input_ids"][:, 1:], reduction="none") * shown
        return tokens.sum(1) / (shown.sum() / len(shown) if batch_mean else shown.sum(1))

    return loss


def decoder() -> nn.Module:
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, num_key_value_heads=2, pad_token_id=0, **shape))
    return inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False), model)


def test_a_mean_over_all_tokens_of_a_batch_is_refused() -> None:
    long, short, longer = texts(12, 3, 20)
    assert not why_alone(decoder(), causal(False), [long, short, longer], Collate(0))
    for items in ([long, short, longer], [long] * 5):
        with refused(ModelError):
            why_alone(decoder(), causal(True), items, Collate(0))


EXAMPLES = {**EXAMPLE, "privacy.noise_multiplier": 1.0}
NO_ROOM, ROOM = 1e-6, 1e6


class Coupled:
    """A loss that depends on the other examples of the batch, with the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        own = functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
        return own - own.mean()


class Remembering(toys.Toy):
    """A model that keeps the mean of its inputs in a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.centre = torch.nn.Parameter(torch.zeros(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.centre.data.lerp_(x.detach().mean(0), 0.1)
        return super().forward(x)


class Listening:
    """Keeps the promise, and the number of losses computed before it."""

    def __init__(self, loss: Coupled) -> None:
        self.loss, self.promised, self.before = loss, list[str](), -1

    def on_promise(self, sentences: list[str]) -> None:
        self.promised, self.before = sentences, self.loss.calls


def privately(tmp_path: Path, settings: dict[str, Any], epsilon: float, **own: Any) -> tuple[Federation, Ledger]:
    """A private federation, and the ledger that it shares, with room for `epsilon`."""
    path = tmp_path / "wards.sqlite"
    book = Ledger.create(path, data_set="wards", epsilon=epsilon, delta=0.9)
    return federation({**settings, "privacy.ledger": str(path)}, **own), book


def test_a_ledger_without_room_refuses_before_any_trial(tmp_path: Path) -> None:
    loss = Coupled()
    with pytest.raises(BudgetExhausted):
        privately(tmp_path, EXAMPLES, NO_ROOM, loss=loss)[0].run(tmp_path / "run")
    assert loss.calls == 0
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("unit", "said"),
    [("example", "one example of one client"), ("client", "a client with everything it has")],
    ids=["example", "client"],
)
def test_a_run_that_a_trial_refuses_has_spent_nothing_and_left_nothing(unit: str, said: str, tmp_path: Path) -> None:
    """The guarantee, its noise and its cost come before any trial."""
    loss = Coupled()
    settings, own = (EXAMPLES, {"loss": loss}) if unit == "example" else (NOISE, {"model": Remembering()})
    (built, book), listening = privately(tmp_path, settings, ROOM, **own), Listening(loss)
    built.callbacks.append(listening)
    with refused(ModelError):
        built.run(tmp_path / "run")
    assert (listening.before, loss.calls > 0, book.spent().epsilon) == (0, unit == "example", 0)
    assert not (tmp_path / "run").exists()
    guarantee, noise, cost = listening.promised
    assert said in guarantee
    assert "noise multiplier 1," in noise
    assert "'wards'" in cost


def test_a_run_that_cannot_resume_here_is_refused_before_any_trial(tmp_path: Path) -> None:
    federation(EXAMPLES).run(tmp_path / "run")
    loss = Coupled()
    other = federation({**EXAMPLES, "training.lr": 0.1}, loss=loss)
    with refused(RunDirectoryError):
        other.run(tmp_path / "run", resume=True)
    assert loss.calls == 0


def test_a_run_without_privacy_promises_nothing() -> None:
    listening = Listening(Coupled())
    toys.federation({"federation.rounds": 1}, callbacks=[listening]).run()
    assert listening.promised == []
