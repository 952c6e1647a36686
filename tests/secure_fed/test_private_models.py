"""Models that example-level privacy refuses, each with its reason, before anything is released."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM

from privacy.entropy import SystemEntropy
from privacy.mechanisms import Gaussian
from secure_fed.config import TrainingConfig
from secure_fed.errors import MethodError, ModelError
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.architecture import require_data_free_start, require_supported
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes.passes import tried
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, Placed
from secure_fed.learning.training.objective import Objective, changed, checksums
from secure_fed.learning.training.trials import require_uncoupled, short
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import small_models, toys
from tests.secure_fed.example_gradients import together
from tests.secure_fed.privately import train_privately

CPU = torch.device("cpu")


def trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def with_peft(**settings: Any) -> nn.Module:
    model = small_models.make("bert")
    return inject_adapter_in_model(LoraConfig(r=2, **settings), model)


# Models that are refused for their layers.


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"target_modules": ["query"], "use_dora": True}, r"lora_magnitude_vector.*DoRA.*use_dora"),
        ({"target_modules": ["word_embeddings"]}, r"lora_embedding_A.*LoRA on embeddings.*linear layers"),
        (
            {"target_modules": ["query"], "trainable_token_indices": {"word_embeddings": [1, 2]}},
            "trainable_token_indices",
        ),
    ],
)
def test_adapters_without_proven_gradients_are_refused(settings: dict[str, Any], reason: str) -> None:
    model = with_peft(**settings)
    with pytest.raises(MethodError, match=reason):
        require_supported(model, trainable(model))


@pytest.mark.parametrize(
    "settings", [{}, {"use_rslora": True}, {"bias": "lora_only"}, {"modules_to_save": ["classifier"]}]
)
def test_what_is_proven_is_not_refused(settings: dict[str, Any]) -> None:
    model = with_peft(target_modules=["query", "value"], **settings)
    require_supported(model, trainable(model))


def test_instance_norm_with_statistics_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.InstanceNorm1d(8, track_running_stats=True))
    with pytest.raises(ModelError, match="layer 1 of the model is InstanceNorm1d"):
        Objective(model, classification.loss, torch.device("cpu"))
    Objective(nn.Sequential(nn.Linear(6, 8), nn.InstanceNorm1d(8)), classification.loss, torch.device("cpu"))


@pytest.mark.parametrize("start", ["eva", "corda", "lora_ga"])
def test_starts_that_read_the_data_are_refused_for_every_unit(start: str) -> None:
    model = with_peft(target_modules=["query"])
    model.peft_config["default"].init_lora_weights = start  # type: ignore[index, union-attr]
    for check in (require_data_free_start, lambda model: require_supported(model, [])):
        with pytest.raises(MethodError, match=f"'{start}', which reads the data.*privacy.unit"):
            check(model)


@pytest.mark.parametrize("start", [True, False, "gaussian", "pissa", "olora", "orthogonal"])
def test_starts_without_data_are_not(start: bool | str) -> None:
    require_data_free_start(with_peft(target_modules=["query"], init_lora_weights=start))
    require_data_free_start(small_models.make("bert"))


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("trains", [True, False])
def test_a_largest_norm_of_embeddings_is_refused_for_every_unit(kind: Callable[..., nn.Module], trains: bool) -> None:
    """The rows of the tokens that occur become shorter, without noise."""
    model = nn.Sequential(kind(9, 4, max_norm=2.0).requires_grad_(trains), nn.Linear(4, 2))
    for check in (require_data_free_start, lambda model: require_supported(model, trainable(model))):
        with pytest.raises(ModelError, match=f"layer 0 of the model is {kind.__name__} with max_norm = 2, .*= None"):
            check(model)
    require_data_free_start(nn.Sequential(kind(9, 4), nn.Linear(4, 2)))


# Models that are refused after a trial pass.

Loss = Callable[[nn.Module, Any], Tensor]


def why_alone(model: nn.Module, loss: Loss, items: Sequence[Any], collate: Any) -> str:
    """The reason for computing examples one at a time, or "". Raises where the model or its loss is refused."""
    objective = Objective(model, loss, CPU)
    objective.public = items
    before = Tensors((name, model.get_parameter(name).detach().clone()) for name in trainable(model))
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


@pytest.mark.parametrize("loss", [in_batch_negatives, normalised_by_the_batch, centred])
def test_a_loss_that_couples_examples_is_refused(loss: Loss) -> None:
    with pytest.raises(ModelError, match="the loss of an example depends on the others in its batch"):
        why_alone(toys.model(), loss, toys.examples(1, 5), default_collate)
    assert not why_alone(toys.model(), classification.loss, toys.examples(1, 5), default_collate)


def pulled(model: nn.Module, batch: Any) -> Tensor:
    """Every loss moves with the scores of the whole batch, by little."""
    return classification.loss(model, batch) + 0.05 * torch.tanh(model(batch["x"])).mean()


def test_a_large_loss_hides_no_coupling() -> None:
    items = [*toys.examples(1, 5), toys.examples(2, 1)[0]]
    items[2] = items[2] | {"x": 1e5 * items[2]["x"]}
    with pytest.raises(ModelError, match="the loss of an example depends on the others in its batch"):
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

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

    if not (keeps or couples):
        assert not why_alone(layers, loss, toys.examples(1, 5), default_collate)
        return
    reason = "depends on the others" if couples else r"buffer OwnBatchNorm\.mean of the model changes as it runs"
    with pytest.raises(ModelError, match=reason):
        why_alone(layers, loss, toys.examples(1, 5), default_collate)
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


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(("way", "once"), [("copy", False), ("data", False), ("backward", False), ("data", True)])
def test_a_layer_that_writes_to_its_parameters_is_refused(way: str, once: bool, trains: bool) -> None:
    with pytest.raises(ModelError, match=r"parameter 1\.kept of the model changes as it runs"):
        why_alone(layers_with(Writes(way, trains, once)), classified, toys.examples(1, 5), default_collate)
    assert not why_alone(layers_with(Writes("", trains)), classified, toys.examples(1, 5), default_collate)


def test_a_frozen_tensor_that_only_the_first_pass_changes_is_noticed() -> None:
    """The first pass is one that asks whether the model takes texts of a width, before the trial itself."""
    model = small_models.make("bert")
    name = next(name for name, _ in model.named_parameters() if name.endswith("embeddings.LayerNorm.weight"))

    def shorten(layer: nn.Module, given: Any) -> None:
        layer.weight.data.clamp_(max=0.9)  # type: ignore[operator, union-attr]

    own = ["classifier.weight", "classifier.bias"]
    items = [{"input_ids": np.arange(2, 2 + n), "labels": n % 3} for n in (3, 5, 9)]
    for writes in (False, True):
        before = Tensors((one, model.get_parameter(one).detach().clone()) for one in [*own, name])
        placed, objective = Placed.of(before, own, CPU), Objective(model, classification.loss, CPU)
        if not writes:
            require_uncoupled(objective, Collate(0), placed, items)
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(shorten)
            continue
        with pytest.raises(ModelError, match=rf"parameter {name} of the model changes as it runs"):
            require_uncoupled(objective, Collate(0), placed, items)


@pytest.mark.parametrize("held", [True, False], ids=["in the state", "in the model"])
@pytest.mark.parametrize("public", [True, False])
def test_clients_that_are_protected_are_not_trained_by_a_model_that_remembers_them(public: bool, held: bool) -> None:
    """A frozen parameter would carry one client's data into the training of the next."""
    model = layers_with(Writes("data", trains=False))
    names = [name for name, one in model.named_parameters() if one.requires_grad or held]
    before = Tensors((name, model.get_parameter(name).detach().clone()) for name in names)
    settings, rng = TrainingConfig(steps=1, batch_size=4), np.random.default_rng(0)
    jobs = [
        Job(before, trainable(model), toys.examples(seed, 5), default_collate, settings, 0.1, rng) for seed in (1, 2)
    ]
    objective, ways = Objective(model, classified, CPU), Ways()
    if public:
        with pytest.raises(ModelError, match=r"parameter 1\.kept of the model changes as it runs"):
            train_together(objective, jobs, ways, public=True)
    else:
        assert len(train_together(objective, jobs, ways)) == 2
        assert held or "parameter 1.kept of the model changes as it runs" in ways.why_not


def test_an_objective_notices_any_parameter_that_changes_and_not_its_own_loading() -> None:
    model = layers_with(Writes("", trains=False))
    objective = Objective(model, classified, CPU)
    objective.note_parameters()
    objective.load(Tensors({"0.bias": torch.ones(8), "1.kept": torch.arange(5.0)}))
    assert objective.changed_parameters() == []
    for change in (lambda one: one.data.add_(1e-3), lambda one: one.data[-1:].neg_()):
        change(model[2].weight)
        assert objective.changed_parameters() == ["2.weight"]
        objective.load(Tensors({"2.weight": model[2].weight.detach().clone()}))
    assert objective.changed_parameters() == []


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


@pytest.mark.parametrize("count", [512, 2**18 + 3])
def test_a_checksum_changes_with_all_numbers_at_once(count: int) -> None:
    """Their scale, signs and order, near and far."""
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0))
    others = [2 * tensor, -tensor, tensor.flip(0), tensor.roll(1), tensor.roll(2**16), tensor.abs()]
    assert all(changed(checksums({"a": tensor}), {"a": other}) for other in others[: 4 if count == 512 else None])


class AttendsAcross(nn.Module):
    """Attention over the batch instead of over the tokens, as when batch_first is forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.classifier = nn.MultiheadAttention(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, 1, 6)
        scores: Tensor = self.classifier(self.attention(x, x, x)[0].squeeze(1))
        return scores


def test_attention_across_examples_is_refused() -> None:
    torch.manual_seed(0)
    with pytest.raises(ModelError, match="depends on the others"):
        why_alone(AttendsAcross(), classification.loss, toys.examples(1, 5), default_collate)


def test_padding_that_counts_is_refused() -> None:
    """The model receives no attention mask."""

    def maskless(model: nn.Module, batch: Any) -> Tensor:
        return classification.loss(model, {name: value for name, value in batch.items() if name != "attention_mask"})

    items = [{"input_ids": np.arange(2, 2 + n), "labels": n % 3} for n in (3, 5, 9)]
    model = small_models.make("bert")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8)  # else words hardly count, and padding neither
    why_alone(model, classification.loss, items, Collate(0))  # is not refused
    with pytest.raises(ModelError, match="padding counts"):
        why_alone(model, maskless, items, Collate(0))


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


def test_training_refuses_before_it_draws() -> None:
    class Untouched:
        def uniform(self, count: int) -> Any:
            raise AssertionError("coins were drawn")

    model = toys.model()
    before = Tensors((name, parameter.detach().clone()) for name, parameter in model.named_parameters())
    objective = Objective(model, normalised_by_the_batch, CPU)
    with pytest.raises(ModelError, match="depends on the others"):
        train_privately(
            objective,
            Job(
                *(before, list(before), toys.examples(1, 5), default_collate, TrainingConfig(), 0.1),
                np.random.default_rng(0),
            ),
            mechanism=Gaussian(1.0),
            clip_norm=1.0,
            steps=1,
            stream=Untouched(),  # type: ignore[arg-type]
        )


# Causal language models.


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


def norm_of_the_first(loss: Loss, items: Sequence[Any]) -> float:
    model = decoder()
    objective = Objective(model, loss, CPU)
    before = Tensors((name, model.get_parameter(name).detach().clone()) for name in trainable(model))
    found = together(objective, Collate(0), Placed.of(before, list(before), CPU), items)
    return float(torch.stack([gradient[0].norm() for gradient in found.values()]).norm())


def test_batch_mates_do_not_move_an_examples_norm_and_a_mean_over_all_tokens_is_refused() -> None:
    long, short, longer = ({"input_ids": np.arange(2, 2 + n), "labels": 0} for n in (12, 3, 20))
    alone, beside = ([long], [long, short]), ([long, longer], [long, short, longer])
    own = [norm_of_the_first(causal(False), mates) for mates in (*alone, *beside)]
    assert max(own) / min(own) == pytest.approx(1, abs=1e-4)
    coupled = [norm_of_the_first(causal(True), mates) for mates in alone]
    assert coupled[1] / coupled[0] > 1.2
    items = [long, short, longer]
    assert not why_alone(decoder(), causal(False), items, Collate(0))
    with pytest.raises(ModelError, match="averaged over all tokens"):
        why_alone(decoder(), causal(True), items, Collate(0))
    with pytest.raises(ModelError, match="averaged over all tokens"):
        why_alone(decoder(), causal(True), [long] * 5, Collate(0))


@pytest.mark.nightly
def test_a_system_stream_serves_a_decoder() -> None:
    model = decoder()
    names = trainable(model)
    before = Tensors((name, model.get_parameter(name).detach().clone()) for name in names)
    items = [{"input_ids": np.arange(2, 2 + n), "labels": 0} for n in (12, 3, 20)]
    done = train_privately(
        Objective(model, causal(False), CPU),
        Job(before, names, items, Collate(0), TrainingConfig(), 0.1, np.random.default_rng(0)),
        mechanism=Gaussian(1.0),
        clip_norm=1.0,
        steps=2,
        stream=SystemEntropy().stream(),
    )
    assert done.after.is_finite()
