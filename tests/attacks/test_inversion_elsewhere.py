"""Attacks on texts where they do not apply: one clear sentence, whatever the model, the data and the task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attacks import gradient_inversion, label_counts, sum_inversion
from attacks.adversary.case import Case, Inapplicable, Settings
from secure_fed import Federation, RunConfig
from tests.attacks import canaried, small_lm
from tests.attacks.federations import case, seen
from tests.attacks.small_lm import saved
from tests.golden import refused
from tests.secure_fed import toys
from tests.secure_fed.tasks.toy_tasks import TOYS

INVERSIONS = (gradient_inversion.run, sum_inversion.run)

TEXTS, WORDS, LENGTH = 40, 60, 6
SGD = {"training.optimizer": "sgd", "training.lr": 0.5, "training.batch_size": 8, "method.rank": 8}


class Items:
    """A data set in torch's form: a length and items, but no slices."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        if not isinstance(index, int):
            raise TypeError("no slices")
        return self.items[index]


def own(model: nn.Module, train: list[Any], test: Any, settings: dict[str, Any] | None = None, **parts: Any) -> Case:
    config = toys.config({**SGD, "federation.rounds": 1, "federation.clients": len(train), **(settings or {})})
    return seen(Federation(config, model=model, train=train, test=test, **parts))


def texts(seed: int, count: int) -> list[dict[str, Any]]:
    ids = torch.randint(4, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row.tolist(), "attention_mask": [1] * LENGTH, "labels": int(row[1] % 3)} for row in ids]


class Classifier(nn.Module):
    """A classifier of one's own that reads texts, returns a tensor, and takes nothing but input_ids."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_labels=3, pad_token_id=0)
        self.embed = nn.Embedding(WORDS, 16)
        self.query, self.classifier = nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores: Tensor = self.classifier(self.query(self.embed(input_ids)).tanh().mean(1))
        return scores


class Pooled(Classifier):
    """It says what embeds its tokens, and means them before the first layer with an adapter."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        scores: Tensor = self.classifier(self.query(self.embed(input_ids).mean(1)).tanh())
        return scores


class Named(Pooled):
    """It calls its input otherwise."""

    def forward(self, words: Tensor) -> Tensor:  # type: ignore[override]
        return Classifier.forward(self, words)


class Told(Pooled):
    """It is built as the inversion needs it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return Classifier.forward(self, input_ids, attention_mask)


def stacked(items: list[Any]) -> dict[str, Tensor]:
    given = {"words": torch.tensor([item["input_ids"] for item in items])}
    return given | {"labels": torch.tensor([item["labels"] for item in items])}


def own_texts(model: nn.Module, **parts: Any) -> Case:
    return own(model, [Items(texts(seed, 8)) for seed in (1, 2)], Items(texts(9, TEXTS)), **parts)


@pytest.fixture(scope="module")
def numbers() -> Case:
    """A model of numbers, which has no tokens."""
    clients = [Items(canaried.examples(client, 8)) for client in (1, 2, 3)]
    layers = {"method.target_modules": ["query", "value"]}
    return own(canaried.wide(), clients, Items(canaried.examples(99, 40)), layers)


def test_numbers_have_no_tokens_and_labels_are_counted_of_models_that_return_a_tensor(numbers: Case) -> None:
    for attack in INVERSIONS:
        with refused(Inapplicable):
            attack(numbers, Settings())
    found = label_counts.run(numbers, Settings()).measured
    assert found["clients"] == 3
    assert found["l1_error"] < found["baseline_l1"]


@pytest.mark.parametrize(("model", "collate"), [(Classifier, None), (Pooled, None), (Named, stacked)])
def test_models_that_cannot_be_read(model: type[nn.Module], collate: Any) -> None:
    """Which of its layers embeds tokens is not said; it does not read one vector a token; it calls its input otherwise."""
    of = own_texts(model(), collate=collate, settings={"method.target_modules": ["query"]})
    for attack in INVERSIONS:
        with refused(Inapplicable):
            attack(of, Settings())


def test_models_of_ones_own_are_read_where_they_say_enough() -> None:
    """Sixteen numbers wide, so at most fifteen tokens can be told; of a text of six, all are."""
    clients = [Items(texts(seed, 1)) for seed in (1, 2)]
    torch.manual_seed(0)
    of = own(Told(), clients, Items(texts(9, TEXTS)), {"method.target_modules": ["query"], "method.rank": 12})
    found = gradient_inversion.run(of, Settings()).measured
    assert found["exact_applicable"] == 2
    assert found["recall"] == found["precision"] == 1.0


def test_other_losses_are_no_cross_entropy() -> None:
    def squares(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch["x"]), F.one_hot(batch["labels"], 3).float(), reduction="none").mean(1)

    clients = [canaried.examples(client, 8) for client in (1, 2)]
    with refused(Inapplicable):
        label_counts.run(own(canaried.wide(), clients, canaried.examples(99, 40), loss=squares), Settings())


@pytest.mark.nightly
@pytest.mark.parametrize("task", ["causal_lm", "tokens", "regression"])
def test_texts_of_other_tasks_are_read_and_not_counted(task: str, tmp_path: Path) -> None:
    """The first layers do not know the task. Nobody learns what follows the last word of a text: that token is not told."""
    for name, count in (("train", 3), ("test", 12)):
        lines = [json.dumps(row) + "\n" for row in TOYS[task].rows(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    data = {"train": str(tmp_path / "train.jsonl"), "test": str(tmp_path / "test.jsonl"), "task": task}
    unused = {"data__examples": None, "data__test_examples": None}
    settings = {f"data__{name}": value for name, value in (data | TOYS[task].settings).items()} | unused
    if task == "causal_lm":
        tokenizer = Federation(RunConfig()).assembly.problem.tokenizer
        saved(small_lm.untrained(tokenizer), tokenizer, tmp_path / "model")
        settings |= {"model__name": str(tmp_path / "model"), "method__target_modules": ("c_attn",)}
    of = case(model__max_length=32, **{"method__rank": 24 if task == "causal_lm" else 48}, **settings)
    told = [row for row in gradient_inversion.run(of, Settings()).measured["per_update"] if row["exact_applicable"]]
    assert len(told) >= 3
    assert max(row["bag_recall"] for row in told) >= 7 / 8
    assert all(row["bag_precision"] in (None, 1.0) for row in told)
    assert sum_inversion.run(of, Settings()).measured["sums"] == 2
    with refused(Inapplicable):
        label_counts.run(of, Settings())
