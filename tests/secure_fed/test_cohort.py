"""Clients that share passes get the result of training one after the other, which is the definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from secure_fed.config import TrainingConfig
from secure_fed.learning.data.encode import IGNORED, Collate
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes import trainings
from secure_fed.learning.training.common_passes.packing import Room, Tight
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Falling, Job, Trained, train
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.secure_fed import small_models, toys

CPU = torch.device("cpu")
USUAL = TrainingConfig(batch_size=4, lr=0.02, epochs=2)
SIZES = (9, 4, 1, 0, 14, 6)  # unequal numbers and sizes of steps; one client has no examples


@dataclass(frozen=True)
class Setting:
    """A model and the names of its trainable parameters."""

    objective: Objective
    names: Sequence[str]
    collate: Callable[[Sequence[Any]], Any] = Collate(0)  # noqa: RUF009 - it has no state

    def jobs(
        self,
        sizes: Sequence[int] = SIZES,
        trainable: Sequence[str] | None = None,
        settings: TrainingConfig = USUAL,
        lr: float | None = None,
        collate: Callable[[Sequence[Any]], Any] | None = None,
        falling: Falling | None = None,
    ) -> list[Job]:
        """The same jobs at every call; each starts from its own random tensors, where no gradient vanishes."""
        start, generator = read(self.objective.model, self.names), torch.Generator().manual_seed(0)
        return [
            Job(
                Tensors(
                    (name, start.tensor(name) + 0.05 * torch.randn(start[name].shape, generator=generator))
                    for name in start
                ),
                trainable or self.names,
                texts(number, size),
                collate or self.collate,
                settings,
                settings.lr if lr is None else lr,
                np.random.default_rng(number),
                last=tuple(name for name in self.names if "classifier" in name),
                falling=falling,
            )
            for number, size in enumerate(sizes)
        ]

    def both(
        self, settings: TrainingConfig = USUAL, ways: Ways | None = None, **own: Any
    ) -> tuple[list[Trained], list[Trained]]:
        """The results of training together, and of training one after the other."""
        own["settings"] = settings
        together = train_together(self.objective, self.jobs(**own), ways)
        return together, [train(self.objective, job) for job in self.jobs(**own)]


def texts(seed: int, count: int) -> list[dict[str, Any]]:
    """Texts of 2 to 9 words."""
    rng = np.random.default_rng([7, seed])
    return [
        {"input_ids": rng.integers(2, small_models.VOCABULARY, 2 + (5 * i + seed) % 8), "labels": int(rng.integers(3))}
        for i in range(count)
    ]


def adapted(architecture: str | nn.Module, loss: Any = classification.loss) -> Setting:
    model = architecture if isinstance(architecture, nn.Module) else small_models.make(architecture)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    config: Any = model.config
    for name in ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    LoraAdapter(rank=2).inject(model, small_models.head_of(model), 0)
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return Setting(Objective(model, loss, CPU), names)


def require_equal(found: Sequence[Trained], expected: Sequence[Trained], tolerance: float = 1e-5) -> None:
    for one, other in zip(found, expected, strict=True):
        assert list(one.after) == list(other.after)
        assert one.loss == pytest.approx(other.loss, rel=1e-5, nan_ok=True)
        for name in one.after:
            torch.testing.assert_close(one.after.tensor(name), other.after.tensor(name), rtol=0, atol=tolerance)


@pytest.mark.parametrize("architecture", chosen(small_models.ARCHITECTURES, ["bert", "deberta_v3", "llama"]))
def test_in_common_passes_each_is_what_it_is_by_itself(architecture: str) -> None:
    setting, ways = adapted(architecture), Ways()
    settings = replace(USUAL, optimizer="sgd", lr=0.1)
    together, alone = setting.both(settings, ways)
    reasons = [trial.why_not for trial in ways.trials.values()]
    if architecture == "deberta_v3":  # its adapted layers also read position embeddings, which all examples share
        assert ["not each has its part" in reason for reason in reasons] == [True]
    else:
        assert reasons == [""], "they shared passes"
    require_equal(together, alone)
    moved = [one.after - job.before.select(one.after) for one, job in zip(together, setting.jobs(), strict=True)]
    assert [change.norm() > 1e-2 for change in moved] == [size > 0 for size in SIZES]
    assert math.isnan(together[3].loss)
    assert setting.objective.changed_buffers() == []
    assert setting.objective.model.training


@every("optimizer", ["adamw", "sgd"])
def test_where_the_rate_falls_each_client_is_as_far_as_its_own_steps(optimizer: str) -> None:
    """The clients make 6, 2, 2, 0, 8 and 4 steps."""
    setting, ways = toy(), Ways()
    settings = replace(USUAL, optimizer=optimizer, lr=0.05, head_factor=3.0, weight_decay=0.1)
    together, alone = setting.both(settings, ways, falling=Falling(replace(settings, lr_schedule="linear"), 0, 1))
    assert ways.why_not == "", "they shared passes"
    require_equal(together, alone)
    constant = train_together(setting.objective, setting.jobs(settings=settings))
    assert all(
        (one.after - other.after).norm() > 1e-3 for one, other in zip(together, constant, strict=True) if one.loss > 0
    )


@every(
    "changed",
    [
        {"optimizer": "adamw", "weight_decay": 0.1, "head_factor": 0.5},
        {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1, "microbatch": 3},
        {"optimizer": "sgd", "steps": 3, "proximal": 0.5, "max_grad_norm": 0.5, "head_factor": 4.0},
    ],
)
def test_optimisers_are_each_ones_own(changed: Mapping[str, Any]) -> None:
    """A client that has made all its steps takes no part in later passes: with momentum or AdamW it would still move."""
    setting, ways = adapted("bert"), Ways()
    together, alone = setting.both(replace(USUAL, **changed), ways)
    assert ways.why_not == ""
    # AdamW's first steps are nearly the signs of gradients, so rounding shows where a gradient is close to zero.
    require_equal(together, alone, 2e-4 if changed["optimizer"] == "adamw" else 1e-5)


def test_many_are_begun_a_few_at_a_time_and_come_back_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "_CLIENTS", 7)
    setting = toy()
    sizes = [3 + number % 11 for number in range(20)]
    together, alone = setting.both(replace(USUAL, epochs=1), Ways(), sizes=sizes)
    require_equal(together, alone)


def test_kinds_that_train_unlike_tensors_share_no_pass() -> None:
    setting, ways = toy(), Ways()
    names = [["classifier.weight"], ["classifier.weight", "query.weight"]]
    jobs = [replace(job, trainable=names[number % 2]) for number, job in enumerate(setting.jobs((8, 8, 8, 8), lr=0.1))]
    found = train_together(setting.objective, jobs, ways)
    assert [list(one.after) for one in found] == [names[0], names[1], names[0], names[1]]
    assert [trial.why_not for trial in ways.trials.values()] == ["", ""]


def toy(dropout: float = 0.0, loss: Any = None, seen: Callable[[Tensor], Tensor] = lambda x: x) -> Setting:
    """The setting of `toys.Toy` on the counts of words."""
    model = toys.model(dropout=dropout)
    forward = model.forward

    def of_words(input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weights = attention_mask.unsqueeze(-1).float()
        counts = (functional.one_hot(input_ids % 6, 6) * weights).sum(1)
        return forward(seen(counts))

    model.forward = of_words  # type: ignore[assignment]
    return Setting(Objective(model, loss or classification.loss, CPU), [name for name, _ in model.named_parameters()])


def mean_over_the_batch(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss that couples examples: examples that only pad a batch would change it."""
    losses = classification.loss(model, batch)
    return losses * losses.mean()


def by_any(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss whose control flow depends on the whole batch."""
    losses = classification.loss(model, batch)
    return losses * 2 if (batch["attention_mask"] == 0).any() else losses


def drawing(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """A loss that draws one coin for the whole batch."""
    losses = classification.loss(model, batch)
    return losses * (2 if torch.rand(()) < 0.5 else 1)


@every(
    ("loss", "reason"),
    [
        (mean_over_the_batch, "not those of one client at a time"),
        (by_any, "not those of one client at a time"),
        (drawing, "random numbers beyond dropout"),
    ],
)
def test_what_common_passes_would_get_wrong_is_trained_one_after_the_other(loss: Any, reason: str) -> None:
    setting, ways = toy(loss=loss), Ways()
    together, alone = setting.both(replace(USUAL, optimizer="sgd", lr=0.01), ways)
    assert reason in ways.why_not
    assert [one.after.to_bytes() for one in together] == [one.after.to_bytes() for one in alone]


def test_dropout_follows_the_rngs_alone_and_differs_between_trainings() -> None:
    setting, ways = toy(dropout=0.5), Ways()
    torch.manual_seed(1)
    first = setting.both(USUAL, ways)[0]
    torch.manual_seed(2)
    state = torch.get_rng_state()
    again = setting.both(USUAL, ways)[0]
    assert ways.why_not == ""
    assert torch.equal(torch.get_rng_state(), state)
    assert [one.after.to_bytes() for one in first] == [one.after.to_bytes() for one in again]
    job = setting.jobs(lr=0.1)[0]
    twins = [replace(job, rng=np.random.default_rng(seed)) for seed in (0, 0)]
    trained = train_together(setting.objective, twins, ways)
    assert trained[0].after.to_bytes() != trained[1].after.to_bytes(), "the same batches, and each its own dropout"


def test_a_pass_of_a_language_model_has_room_for_the_scores_of_its_labelled_tokens() -> None:
    room = Room(tokens=1000, rows=48, words=100, scores=500)
    labelled = [6, 2, 0, 1, 2, 3, 2, 0, 0]
    entries = [(0, {"input_ids": [1] * 8, "labels": np.repeat([3, IGNORED], [some, 8 - some])}) for some in labelled]
    packs = [pack for pack, _ in Tight(Collate(0), room, apart=True).packs(entries, [0])]
    found = [[int((item["labels"] != IGNORED).sum()) for item in pack.items] for pack in packs]
    assert found == [[6], [2, 0, 1, 2], [3, 2, 0, 0]]
    assert room.of_width(2) == 2, "of public shape: whatever the labels"
