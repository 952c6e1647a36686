"""A unit's share of a private step does not depend on the other drawn units: by brute force, through local training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from secure_fed.config import MethodConfig, TrainingConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes.packing import Public
from secure_fed.learning.training.common_passes.packing import Room as Space
from secure_fed.learning.training.common_passes.passes import Places, found_in
from secure_fed.learning.training.common_passes.step_gradients import example_gradients
from secure_fed.learning.training.common_passes.trainings import Ways
from secure_fed.learning.training.local import Job, Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.pass_shapes import Kinds, Padded, agreeing_sizes
from secure_fed.learning.training.trials import made_up, of_kind, varied
from secure_fed.methods import build
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.example_gradients import one_by_one
from tests.secure_fed.privately import Landing, Noted, less, norm, train_privately
from tests.secure_fed.test_per_example import texts, without_dropout

CPU = torch.device("cpu")
CLIP = 0.05

Sums = Callable[[Sequence[int]], dict[str, Tensor]]


def sums(
    objective: Objective,
    before: Tensors,
    items: Sequence[Any],
    collate: Any,
    groups: Sequence[Any] | None = None,
) -> Sums:
    """A function from the drawn units to the sum of clipped gradients of one step at `before`."""
    ways = Ways()

    def of(present: Sequence[int]) -> dict[str, Tensor]:
        noted, settings = Noted(1.0), TrainingConfig(batch_size=2)
        job = Job(before, list(before), items, collate, settings, 0.1, np.random.default_rng(0))
        private = {"mechanism": noted, "clip_norm": CLIP, "stream": Landing(present), "groups": groups, "ways": ways}
        train_privately(objective, job, steps=1, **private)
        return noted.sums[0]

    return of


def check_shares(of: Sums, units: int, companies: int) -> None:
    """In drawn sets of any size and order, a unit moves the sum by at most C, and as much as when it is drawn alone."""
    rng, norms = np.random.default_rng(5), list[float]()
    for size in rng.integers(2, units + 1, companies):
        present = rng.permutation(units)[:size].tolist()
        whole = of(present)
        for unit in present[:3]:
            moved, alone = less(whole, of([other for other in present if other != unit])), of([unit])
            assert norm(moved) <= CLIP
            assert norm(less(moved, alone)) < 1e-12 * CLIP
            norms.append(norm(alone))
    assert max(norms) > 0.999 * CLIP


def sizes(objective: Objective) -> list[tuple[int, ...]]:
    """The pass sizes of each kind of example that a comparison found."""
    results: dict[Any, Any] = objective.kept.results
    return [found for (about, *_), found in results.items() if about not in ("uncoupled", "common passes")]


# Layers that couple the examples of a full batch.


class Room(nn.Module):
    """A layer with room for the four examples of a batch that score best; it does not change the others."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.score, self.change, self.room = nn.Linear(8, 1), nn.Linear(8, 8), room

    def forward(self, h: Tensor) -> Tensor:
        scores = self.score(h).squeeze(1)
        last = scores.sort(descending=True, stable=True).values[: self.room][-1]
        return h + 4 * self.change(h) * (scores >= last)[:, None]


class ToyRouter(Room):
    """A `Room` that is named like such layers in transformers."""


def losses(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


def with_room(kind: type[Room], room: int) -> tuple[Objective, Tensors]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), kind(room), nn.Tanh(), nn.Linear(8, 3))

    objective = Objective(layers, losses, CPU)
    objective.public = toys.examples(2, 60)
    return objective, toys.weights(layers)


def test_a_layer_with_room_for_four_examples_is_refused() -> None:
    """One example more would move the sum by up to 2.4 C."""
    objective, before = with_room(Room, 4)
    with refused(ModelError):
        sums(objective, before, toys.examples(1, 12), default_collate)([0])


@pytest.mark.parametrize(
    ("kind", "room", "units", "found"),
    chosen(
        [(ToyRouter, 4, 12, []), (Room, 20, 60, [(2, 8)]), (Room, 6, 60, [(2,)])],
        [(ToyRouter, 4, 12, [])],
    ),
)
def test_where_no_pass_holds_more_than_there_is_room_for_shares_are_each_examples_own(
    kind: type[Room], room: int, units: int, found: list[tuple[int, ...]]
) -> None:
    """One by one, because of the layer's name; and where five examples show no coupling, a comparison of larger passes does."""
    objective, before = with_room(kind, room)
    check_shares(sums(objective, before, toys.examples(1, units), default_collate), units, 2)
    assert sizes(objective) == found


# The comparison of passes to the bit.


def compared(run: Callable[[list[int]], list[float]], candidates: Sequence[int], count: int = 12) -> tuple[int, ...]:
    """The sizes that agree, of a model that computes one number for each example."""
    return agreeing_sizes(lambda items: [torch.tensor(run(items))[:, None]], range(count), candidates)


@every(("one", "candidates"), itertools.product(range(12), [(2, 3, 12), (12,)]))
def test_whichever_example_or_row_a_pass_treats_otherwise_a_comparison_sees_it(
    one: int, candidates: tuple[int, ...]
) -> None:
    """A full pass drops one example, or computes one row otherwise, or adds to each example that is beside a certain one."""

    def dropped(items: Sequence[int]) -> list[float]:
        return [0.0 if item == one and len(set(items)) > 10 else item + 1.0 for item in items]

    def by_row(items: Sequence[int]) -> list[float]:
        return [item + 1.0 + (row == one and len(items) == 12) * 1e-3 for row, item in enumerate(items)]

    def beside(items: Sequence[int]) -> list[float]:
        return [item + 1.0 + (item != one and one in items and len(items) > 3) * 1e-3 for item in items]

    for run in (dropped, by_row, beside):
        assert compared(run, candidates) == candidates[:-1], run.__name__
    assert compared(lambda items: [item + 1.0 for item in items], candidates) == candidates


@every("room", range(5, 24))
def test_passes_larger_than_there_is_room_for_are_not_used_whoever_scores_best(room: int) -> None:
    """A pass changes the examples that score best, as many as there is room for. Each example in a large pass is also compared
    with itself in a smaller one: with copies of one example in the large pass, the same examples can be left out by chance.
    """
    for seed in range(4):
        scores = np.random.default_rng(seed).normal(size=24)

        def changed(items: Sequence[int], scores: Any = scores) -> list[float]:
            last = sorted(scores[items], reverse=True)[:room][-1]
            return [item + float(scores[item] >= last) for item in items]

        assert (*compared(changed, (2, 8, 24), 24), 0)[-2] <= room


def test_passes_that_draw_random_numbers_are_not_used() -> None:
    """Only large passes draw random numbers here; the drawn numbers could couple the examples of a pass."""

    def drawing(items: Sequence[int]) -> list[float]:
        return [item + 0.0 * float(torch.rand(())) if len(items) > 8 else float(item) for item in items]

    assert compared(drawing, (2, 3, 12)) == (2, 3)


def test_a_comparison_costs_few_passes() -> None:
    """As much as three passes of the largest size, and one more for each smaller size; where all sizes differ too."""
    passes = []

    def equal(items: Sequence[int], differ: float = 0.0) -> list[float]:
        passes.append(len(items))
        return [item + differ * len(items) for item in items]

    assert compared(equal, (2, 3, 12)) == (2, 3, 12)
    assert sum(passes) <= 5 * 12
    passes.clear()
    assert compared(lambda items: equal(items, 1.0), (2, 256, 1024), 1024) == (2,)
    assert compared(lambda items: equal(items, 1.0), (1024,), 1024) == (1024,)
    assert len(passes) <= 15


@pytest.mark.parametrize(("from_size", "found"), [(None, (2, 16, 48)), (20, (2, 16)), (3, (16, 48)), (2, (2, 16, 48))])
def test_gradients_have_the_same_bits_in_passes_of_every_size(from_size: int | None, found: tuple[int, ...]) -> None:
    """from_size: the pass size from which the model computes otherwise."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = losses(model, batch)
        return found * (1 + 1e-5 * (from_size is not None and len(found) >= from_size))

    objective, placed = linear(loss)
    public, items = Public(objective, default_collate, Space(4096, 48), placed), toys.examples(1, 192)
    where = Places.of([placed])

    def gradients(count: int) -> list[bytes]:
        packs = [pack for pack, _ in public.packs([(0, item) for item in items[:count]], [0])]
        return [row.numpy().tobytes() for pack in packs for row in found_in(objective, where, pack).gradients["weight"]]

    whole = gradients(192)
    assert all(gradients(count) == whole[:count] for count in (5, 1, 2, 50))
    assert sizes(objective) == [found]


def linear(loss: Any) -> tuple[Objective, Placed]:
    """A linear layer whose weight trains, with public examples."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    objective = Objective(layer, loss, CPU)
    objective.public = toys.examples(2, 48)
    return objective, Placed.of(toys.weights(layer), ["weight"], CPU)


# On an accelerator passes have one size, which most steps fill.


@pytest.mark.parametrize(
    ("device", "expected", "rows"),
    [("cuda", 8.0, 17), ("cuda", 256.0, 256), ("cuda", float("inf"), 256), ("cpu", 8.0, 48)],
)
def test_a_pass_has_room_for_most_steps_and_for_little_more(device: str, expected: float, rows: int) -> None:
    room = Space.of(torch.device(device), nn.Identity(), 1000, public=True, expected=expected)
    assert (room.filled, room.of_width(32)) == (device == "cuda", rows)
    assert not Space.of(torch.device(device), nn.Identity(), 1000, public=False, expected=expected).filled


@pytest.mark.parametrize("coupled", [False, True])
def test_filled_passes_have_one_size_or_hold_one_example(coupled: bool) -> None:
    """The loss depends on the size of a pass, as on a GPU; if coupled, also on an example's row. Clients share no pass."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = losses(model, batch)
        return found * (1 + 1e-5 * len(found)) * (1 + 1e-5 * coupled * torch.arange(len(found)))

    objective, placed = linear(loss)
    public = Public(objective, default_collate, Space(4096, 17, filled=True), placed)
    entries = [(number % 2, item) for number, item in enumerate(toys.examples(1, 40))]
    packs = [pack for pack, _ in public.packs(entries, [0, 1])]
    assert [(len(pack.items), pack.count) for pack in packs] == ([(1, 1)] * 40 if coupled else [(17, 17), (17, 3)] * 2)
    assert all(len(set(pack.owners)) == 1 for pack in packs)


def test_a_size_for_which_memory_lacks_is_an_error_and_no_verdict() -> None:
    """Memory depends on what other clients hold, and so would the bits of this client's gradients."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if len(batch["x"]) > 8:
            raise torch.OutOfMemoryError
        return losses(model, batch)

    objective, placed = linear(loss)
    public = Public(objective, default_collate, Space(4096, 17, filled=True), placed)
    with refused(ConfigError, "training.microbatch"):
        list(public.packs([(0, item) for item in toys.examples(1, 20)], [0]))


# Kinds of examples, and the examples that they are tried on.


def test_an_accelerator_has_fewer_widths() -> None:
    objective = Objective(nn.Identity(), classification.loss, CPU)
    assert Kinds.of(objective, Collate(0)).apart == 8
    objective.device = torch.device("cuda")
    assert Kinds.of(objective, Collate(0)).apart == 32
    kinds = Kinds(Collate(0), longest=100, apart=32)
    few, more, most = (Padded(width, above, False) for width, above in ((32, 0), (64, 31), (96, 63)))
    expected = [few, few, more, most, most, Padded(100, 95, False), Padded(100, 99, True)]
    assert [kinds.padded(tokens) for tokens in (1, 31, 32, 64, 95, 96, 100)] == expected


def test_a_kind_is_a_matter_of_the_example_alone() -> None:
    kinds = Kinds(Collate(0), longest=100)
    widths = [kinds({"input_ids": [1] * n, "labels": 0}) for n in (1, 15, 16, 17, 48, 49, 95, 96, 99, 100)]
    bounds = [(8, 0), (16, 7), (24, 15), (24, 15), (56, 47), (56, 47), (96, 79), (100, 95), (100, 95)]
    assert widths[:-1] == [Padded(width, above, False) for width, above in bounds]
    assert widths[-1] == Padded(100, 99, True), "of the maximum length, so nothing is padded"
    masked = {"input_ids": [1] * 100, "attention_mask": [1] * 99 + [0], "labels": 0}
    assert kinds(masked) == Padded(100, 99, False)
    assert Collate(0).padded_to(112)([masked])["input_ids"].shape == (1, 112)
    short, long = ({"x": torch.zeros(n), "labels": 0} for n in (3, 4))
    assert Kinds(default_collate)(short) != Kinds(default_collate)(long)


def test_a_collate_whose_shapes_go_by_company_is_refused() -> None:
    def uneven(items: Sequence[Any]) -> Any:
        return {"x": torch.zeros(len(items), 3 + len(items))}

    kinds = Kinds(uneven)
    with refused(ModelError):
        kinds.together(kinds(None))([None, None])


def test_a_model_is_tried_out_on_nobodys_texts() -> None:
    """The trial reads only the lengths and the column names of the data."""
    seen: list[Tensor] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch["input_ids"])
        return classification.loss(model, batch)

    model = without_dropout(small_models.make("bert"))
    before = build(MethodConfig(rank=2)).prepare(model, small_models.head_of(model), 0)
    objective = Objective(model, loss, CPU)
    items = [{**item, "input_ids": np.full(len(item["input_ids"]), 3)} for item in texts(6)]
    sums(objective, before, items, Collate(0))([0])
    rows = [row[row != 0] for batch in seen[:-1] for row in batch]
    assert len(rows) > 20
    assert not any(bool((row == 3).all()) for row in rows if len(row) > 2)


def test_made_up_examples_are_of_their_kind_and_of_unequal_lengths() -> None:
    """Equal lengths would hide a loss that is averaged over all tokens of a batch."""
    kinds, model = Kinds(Collate(0), longest=100), small_models.make("bert")
    pattern = {"input_ids": np.arange(9), "token_type_ids": np.zeros(9), "labels": 2}
    for tokens, count in ((6, 5), (50, 5), (70, 9)):
        made = made_up(kinds, kinds.padded(tokens), model, pattern, count)
        assert [kinds(item) for item in made] == [kinds.padded(tokens)] * count
        assert len({len(item["input_ids"]) for item in made}) == count
        assert all(len(item["token_type_ids"]) == len(item["input_ids"]) for item in made)
    assert [len(item["input_ids"]) for item in made_up(kinds, kinds.padded(100), model, pattern, 3)] == [100] * 3


def test_examples_that_are_too_few_are_varied() -> None:
    item = {"x": torch.arange(3.0), "labels": 1, "attention_mask": torch.tensor([1.0, 0.0, 0.0])}
    one, two = varied([item], 2)
    assert one is item
    assert two["x"].tolist() == [2, 0, 1]
    assert (two["labels"], two["attention_mask"].tolist()) == (1, [1, 0, 0])


def test_a_width_that_the_model_has_no_positions_for_is_not_tried() -> None:
    """The model does not state its number of positions: texts fit, but the width to which they would be padded does not."""

    class Nine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places, self.head = nn.Embedding(20, 4), nn.Embedding(9, 4), nn.Linear(4, 2)

        def get_input_embeddings(self) -> nn.Module:
            return self.words

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            states = self.words(input_ids) + self.places.weight[torch.arange(input_ids.shape[1])]
            scores: Tensor = self.head((states * attention_mask.unsqueeze(-1)).sum(1))
            return scores

    objective = Objective(Nine(), classification.loss, CPU)
    objective.public = items = [{"input_ids": np.full(9, 1 + number), "labels": number % 2} for number in range(4)]
    names = ["head.weight", "head.bias"]
    placed = Placed.of(toys.weights(objective.model).select(names), names, CPU)
    kinds = Kinds.of(objective, Collate(0))
    kind = kinds(items[0])
    assert isinstance(kind, Padded)
    assert kind.width > 9
    assert len(of_kind(objective, kinds, placed, kind, items[0], 3)) == 3
    found = example_gradients(objective, Collate(0), placed, items)
    right = one_by_one(objective, Collate(0), placed, items)
    assert all(torch.equal(found[name], right[name]) for name in right)
