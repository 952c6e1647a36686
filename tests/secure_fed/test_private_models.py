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
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.cohort_pass import tried
from secure_fed.learning.training.kind_probe import nobodys
from secure_fed.learning.training.local import Job, Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.per_example import by_layer
from secure_fed.learning.training.supported import require_data_free_start, require_supported
from secure_fed.learning.training.uncoupled import Uncoupled
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import small_models, toys
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


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_gradient_checkpointing_is_refused() -> None:
    for settings in ({}, {"gradient_checkpointing_kwargs": {"use_reentrant": False}}):
        model: Any = small_models.make("bert")
        require_supported(model, trainable(model))
        model.gradient_checkpointing_enable(**settings)
        with pytest.raises(ModelError, match=r"gradient checkpointing is on in .*training\.microbatch"):
            require_supported(model, trainable(model))
        model.gradient_checkpointing_disable()
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


# Models that are refused after a trial pass.

Loss = Callable[[nn.Module, Any], Tensor]


def why_alone(model: nn.Module, loss: Loss, items: Sequence[Any], collate: Any) -> str:
    """The reason for computing examples one at a time, or "". Raises where the model or its loss is refused."""
    objective = Objective(model, loss, CPU)
    before = Tensors((name, model.get_parameter(name).detach().clone()) for name in trainable(model))
    placed = Placed.of(before, list(before), CPU)
    Uncoupled.of(objective, collate, TrainingConfig(), items).require_all(placed, [items])
    return tried(objective, [placed], nobodys(objective, collate, placed, items), collate).why_not


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
    with pytest.raises(ModelError, match="padding counts"):
        why_alone(small_models.make("bert"), maskless, items, Collate(0))


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
    found = by_layer(objective, Collate(0), Placed.of(before, list(before), CPU), items)
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
