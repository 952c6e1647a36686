"""A unit's share of a private step does not depend on the other drawn units: by brute force, through local training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate
from transformers import BertConfig, BertForSequenceClassification

from secure_fed.config import MethodConfig, TrainingConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.cohort import division
from secure_fed.learning.training.cohort.division import Public, Shapes
from secure_fed.learning.training.cohort.division import Room as Space
from secure_fed.learning.training.cohort.one_pass import Places, found_in
from secure_fed.learning.training.cohort.packs import Packs
from secure_fed.learning.training.cohort.trainings import Ways
from secure_fed.learning.training.local import Job, Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials.bit_trial import sizes_that_agree
from secure_fed.learning.training.trials.kind_probe import Probing
from secure_fed.learning.training.trials.kinds import Kinds, Padded, apart_on
from secure_fed.learning.training.trials.made_up import varied
from secure_fed.methods import build
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import small_models, toys
from tests.secure_fed.privately import Landing, Noted, less, norm, train_privately

CPU = torch.device("cpu")
CLIP = 0.05

Sums = Callable[[Sequence[int]], dict[str, Tensor]]


def sums(
    objective: Objective,
    before: Tensors,
    items: Sequence[Any],
    collate: Any,
    groups: Sequence[Any] | None = None,
    microbatch: int | None = None,
) -> Sums:
    """A function from the drawn units to the sum of clipped gradients of one step at `before`."""
    ways = Ways()

    def of(present: Sequence[int]) -> dict[str, Tensor]:
        noted = Noted(1.0)
        train_privately(
            objective,
            Job(
                *(before, list(before), items, collate),
                *(TrainingConfig(batch_size=2, microbatch=microbatch), 0.1, np.random.default_rng(0)),
            ),
            mechanism=noted,
            clip_norm=CLIP,
            steps=1,
            stream=Landing(present),
            groups=groups,
            ways=ways,
        )
        return noted.sums[0]

    return of


def check_shares(of: Sums, units: int, companies: int) -> None:
    """In drawn sets of any size and order, a unit moves the sum by at most C, and as much as when it is drawn alone."""
    rng = np.random.default_rng(5)
    alone = [of([unit]) for unit in range(units)]
    assert max(map(norm, alone)) > 0.999 * CLIP
    for size in rng.integers(2, units + 1, companies):
        present = rng.permutation(units)[:size].tolist()
        whole = of(present)
        for unit in present[:3]:
            moved = less(whole, of([other for other in present if other != unit]))
            assert norm(moved) <= CLIP
            assert norm(less(moved, alone[unit])) < 1e-12 * CLIP


def texts(count: int) -> list[dict[str, Any]]:
    """Texts of 3 to 30 tokens."""
    rng = np.random.default_rng(3)
    lengths = [3 + (7 * i) % 28 for i in range(count)]
    return [{"input_ids": rng.integers(2, small_models.VOCABULARY, n), "labels": i % 3} for i, n in enumerate(lengths)]


def adapted(dtype: torch.dtype) -> tuple[Objective, Tensors]:
    """A small BERT without dropout, and its adapters, all moved away from zero."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96}
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(
        vocab_size=small_models.VOCABULARY, num_labels=3, max_position_embeddings=32, **shape, **dropout
    )
    model = BertForSequenceClassification(config).to(dtype)
    names = build(MethodConfig(rank=2)).prepare(model, small_models.head_of(model), 0)
    generator = torch.Generator().manual_seed(1)
    moved = (
        (n, names.tensor(n).float() + 0.1 * torch.randn(names.tensor(n).shape, generator=generator)) for n in names
    )
    return Objective(model, classification.loss, CPU), Tensors(moved)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", chosen([torch.float32, torch.bfloat16], [torch.float32]), ids=str)
@pytest.mark.parametrize(
    "groups",
    chosen([None, [0, 1, 2, 2, 3, 3, 3, 0, 4, 5, 6, 0, 5]], [[0, 1, 2, 2, 3, 3, 3, 0, 4, 5, 6, 0, 5]]),
    ids=["examples", "groups"],
)
def test_a_units_share_does_not_depend_on_who_else_is_drawn(groups: list[int] | None, dtype: torch.dtype) -> None:
    """With padding to the longest drawn text, shares would move by up to 2e-7 C in float32 and 6e-4 C in bfloat16 here."""
    objective, before = adapted(dtype)
    of = sums(objective, before, texts(13), Collate(0), groups)
    check_shares(of, len(set(groups)) if groups else 13, 3)
    assert {found.sizes for found in shapes(objective)} != {(1,)}


def shapes(objective: Objective) -> list[Shapes]:
    """The shapes of passes, one for each kind of example."""
    return [way for key, way in objective.ways.items() if key[0] == "cohort"]  # type: ignore[index]


# Layers that couple the examples of a full batch.


class Room(nn.Module):
    """A layer with room for the four examples of a batch that score best; it does not change the others."""

    def __init__(self, room: int = 4) -> None:
        super().__init__()
        self.score, self.change, self.room = nn.Linear(8, 1), nn.Linear(8, 8), room

    def forward(self, h: Tensor) -> Tensor:
        scores = self.score(h).squeeze(1)
        last = scores.sort(descending=True, stable=True).values[: self.room][-1]
        return h + 4 * self.change(h) * (scores >= last)[:, None]


class ToyRouter(Room):
    """A `Room` that is named like such layers in transformers."""


def with_room(layer: nn.Module) -> tuple[Objective, Tensors]:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 8), layer, nn.Tanh(), nn.Linear(8, 3))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

    objective = Objective(layers, loss, CPU)
    objective.public = toys.examples(2, 60)
    return objective, Tensors((n, p.detach().clone()) for n, p in layers.named_parameters())


def test_a_layer_with_room_for_four_examples_is_refused() -> None:
    """A trial of three examples accepted this layer, and one example more moved the sum by up to 2.4 C."""
    objective, before = with_room(Room())
    with pytest.raises(ModelError, match="has room for so many of them"):
        sums(objective, before, toys.examples(1, 12), default_collate)([0])


@pytest.mark.parametrize(
    ("layer", "microbatch", "units", "sizes"),
    [(Room(), 4, 12, (1, 2, 3, 4)), (ToyRouter(), None, 12, (1,)), (Room(20), None, 60, (1, 2, 3, 6))],
)
def test_where_no_pass_holds_more_than_there_is_room_for_shares_are_each_examples_own(
    layer: nn.Module, microbatch: int | None, units: int, sizes: tuple[int, ...]
) -> None:
    """Three cases: passes of at most four; one by one, because of the layer's name; a trial that rejects passes too large."""
    objective, before = with_room(layer)
    check_shares(sums(objective, before, toys.examples(1, units), default_collate, microbatch=microbatch), units, 4)
    assert [(found.sizes, found.untried) for found in shapes(objective)] == [(sizes, 0)]


@pytest.mark.parametrize("dropped", range(12))
def test_whichever_example_a_large_pass_has_no_room_for_a_trial_sees_it(dropped: int) -> None:
    """Examples in the middle were tried only in passes of twelve, all of which dropped the same examples."""

    def gradients(items: Sequence[int]) -> dict[str, Tensor]:
        kept = [0.0 if item == dropped and len(set(items)) > 10 else item + 1.0 for item in items]
        return {"w": torch.tensor(kept)[:, None]}

    assert sizes_that_agree(gradients, range(12), (1, 2, 3, 12)) == (1, 2, 3)
    assert sizes_that_agree(gradients, range(12), (12,)) == (), "nor if no smaller size is tried, as on a GPU"


def test_passes_that_draw_random_numbers_are_not_used() -> None:
    """Only large passes draw random numbers here; the drawn numbers could couple the examples of a pass."""

    def gradients(items: Sequence[int]) -> dict[str, Tensor]:
        return {
            "w": torch.tensor(items)[:, None] + 0.0 * torch.rand(1)
            if len(items) > 8
            else torch.tensor(items)[:, None] + 0.0
        }

    assert sizes_that_agree(gradients, range(12), (1, 2, 3, 12)) == (1, 2, 3)


def test_sizes_that_all_differ_cost_a_few_passes_each() -> None:
    """On a GPU most sizes differ: passes for each example against each other size would take long."""
    passes = []

    def gradients(items: Sequence[int]) -> dict[str, Tensor]:
        passes.append(len(items))
        return {"w": torch.tensor(items)[:, None] + float(len(items))}

    sizes = (1, 2, 3, 256, 1024)
    assert sizes_that_agree(gradients, range(1024), sizes) == (1024,)
    assert len(passes) <= 5 * len(sizes)


@pytest.mark.parametrize(
    ("wrong", "sizes"), [((12, 48), (1, 2, 3)), ((48,), (1, 2, 3, 12)), ((2, 3, 12, 48), (1,)), ((1,), (1,))]
)
def test_a_size_that_a_larger_trial_finds_wrong_is_given_up(
    wrong: tuple[int, ...], sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    objective, before = with_room(nn.Identity())
    placed = Placed.of(before, list(before), CPU)
    public, items = Public(objective, default_collate, Space(4096, 48), placed), toys.examples(1, 192)
    list(public.packs([(0, item) for item in items[:5]]))
    assert [(found.sizes, found.untried) for found in shapes(objective)] == [((1, 2, 3, 12), 48)]

    def agreeing(gradients: Any, probe: Sequence[Any], candidates: Sequence[int]) -> tuple[int, ...]:
        assert len(probe) == 48, "on as many examples as the largest pass holds"
        assert probe[0][1] is objective.public[0], "made of public examples, so that a draw decides nothing"
        found = tuple(size for size in candidates if size not in wrong)
        return found if len(found) > 1 else ()

    monkeypatch.setattr(division, "sizes_that_agree", agreeing)
    list(public.packs([(0, item) for item in items[::-1]]))
    assert [(found.sizes, found.untried) for found in shapes(objective)] == [(sizes, 0)]


# The largest passes are tried out when they are first needed.


@pytest.mark.parametrize(("from_size", "sizes"), [(None, (1, 2, 3, 12, 48)), (13, (1, 2, 3, 12)), (3, (3, 12, 48))])
def test_gradients_have_the_same_bits_before_and_after_large_passes_are_tried(
    from_size: int | None, sizes: tuple[int, ...]
) -> None:
    """from_size: the pass size from which the model computes differently. If the small sizes differ, all sizes are tried."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
        return found * (1 + 1e-5 * (from_size is not None and len(found) >= from_size))

    objective = Objective(layer, loss, CPU)
    objective.public = toys.examples(2, 48)
    placed = Placed.of(Tensors((n, p.detach()) for n, p in layer.named_parameters()), ["weight"], CPU)
    public, items = Public(objective, default_collate, Space(4096, 48), placed), toys.examples(1, 192)
    where = Places.of([placed])

    def gradients(count: int) -> list[bytes]:
        packs = public.packs([(0, item) for item in items[:count]])
        return [row.numpy().tobytes() for pack in packs for row in found_in(objective, where, pack).gradients]

    few = gradients(5)
    [before] = shapes(objective)
    assert before.untried == (0 if from_size == 3 else 48)
    assert gradients(192)[:5] == few
    [after] = shapes(objective)
    assert (after.sizes, after.untried) == (sizes, 0)


# On an accelerator passes have one size, which most steps fill.


@pytest.mark.parametrize(
    ("device", "expected", "rows"),
    [("cuda", 8.0, 17), ("cuda", 256.0, 256), ("cuda", float("inf"), 256), ("cpu", 8.0, 48)],
)
def test_a_pass_has_room_for_most_steps_and_for_little_more(device: str, expected: float, rows: int) -> None:
    room = Space.of(torch.device(device), 1000, public=True, expected=expected)
    assert (room.filled, room.of_width(32)) == (device == "cuda", rows)
    assert not Space.of(torch.device(device), 1000, public=False, expected=expected).filled


@pytest.mark.parametrize("coupled", [False, True])
def test_filled_passes_have_one_size_or_hold_one_example(coupled: bool) -> None:
    """The loss depends on the size of a pass, as on a GPU; if coupled, also on an example's row."""
    torch.manual_seed(0)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        found = nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")
        return found * (1 + 1e-5 * len(found)) * (1 + 1e-5 * coupled * torch.arange(len(found)))

    layer = nn.Linear(6, 3)
    objective = Objective(layer, loss, CPU)
    objective.public = toys.examples(2, 48)
    placed = Placed.of(Tensors((n, p.detach()) for n, p in layer.named_parameters()), ["weight"], CPU)
    public = Public(objective, default_collate, Space(4096, 17, filled=True), placed)
    packs = list(public.packs([(0, item) for item in toys.examples(1, 20)]))
    assert [(len(pack.items), pack.count) for pack in packs] == ([(1, 1)] * 20 if coupled else [(17, 17), (17, 3)])


def test_a_size_for_which_memory_lacks_is_an_error_and_no_verdict() -> None:
    """Memory depends on what other clients hold, and so would the bits of this client's gradients."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if len(batch["x"]) > 8:
            raise torch.OutOfMemoryError
        return nn.functional.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")

    layer = nn.Linear(6, 3)
    objective = Objective(layer, loss, CPU)
    objective.public = toys.examples(2, 48)
    placed = Placed.of(Tensors((n, p.detach()) for n, p in layer.named_parameters()), ["weight"], CPU)
    public = Public(objective, default_collate, Space(4096, 17, filled=True), placed)
    with pytest.raises(
        ConfigError, match=r"a pass of 17 examples needs more memory .* set training.microbatch to 8 or less"
    ):
        list(public.packs([(0, item) for item in toys.examples(1, 20)]))


# Kinds of examples, and the examples that they are tried on.


def test_an_accelerator_has_fewer_widths() -> None:
    kinds = Kinds(Collate(0), longest=100, apart=apart_on(torch.device("cuda")))
    widths = [kinds.padded(tokens) for tokens in (1, 31, 32, 64, 95, 96, 100)]
    shapes = [(one.width, one.above, one.full) for one in widths]
    few, more = (32, 0, False), (64, 31, False)
    assert shapes == [few, few, more, (96, 63, False), (96, 63, False), (100, 95, False), (100, 99, True)]
    assert Kinds.of(Objective(nn.Identity(), classification.loss, CPU), Collate(0)).apart == 8


def test_a_kind_is_a_matter_of_the_example_alone() -> None:
    kinds = Kinds(Collate(0), longest=100)
    widths = [kinds({"input_ids": [1] * n, "labels": 0}) for n in (1, 15, 16, 17, 48, 49, 95, 96, 99, 100)]
    assert widths == [
        *(
            Padded(8, 0, False),
            Padded(16, 7, False),
            Padded(24, 15, False),
            Padded(24, 15, False),
            Padded(56, 47, False),
        ),
        *(Padded(56, 47, False), Padded(96, 79, False), Padded(100, 95, False), Padded(100, 95, False)),
        Padded(100, 99, True),  # of the maximum length, so nothing is padded
    ]
    assert all(a != b for a, b in pairwise(dict.fromkeys(widths)))
    masked = {"input_ids": [1] * 100, "attention_mask": [1] * 99 + [0], "labels": 0}
    assert kinds(masked) == Padded(100, 99, False)
    assert Collate(0).padded_to(112)([masked])["input_ids"].shape == (1, 112)
    short, long = ({"x": torch.zeros(n), "labels": 0} for n in (3, 4))
    assert Kinds(default_collate)(short) != Kinds(default_collate)(long)


def test_a_collate_whose_shapes_go_by_company_is_refused() -> None:
    def uneven(items: Sequence[Any]) -> Any:
        return {"x": torch.zeros(len(items), 3 + len(items))}

    kinds = Kinds(uneven)
    with pytest.raises(ModelError, match="has another shape"):
        kinds.together(kinds(None))([None, None])


def test_a_model_is_tried_out_on_nobodys_texts() -> None:
    """The trial reads only the lengths and the column names of the data."""
    objective, before = adapted(torch.float32)
    seen: list[Tensor] = []
    taken = objective.loss
    objective.loss = lambda model, batch: [taken(model, batch), seen.append(batch["input_ids"])][0]  # type: ignore[func-returns-value]
    items = [{**item, "input_ids": np.full(len(item["input_ids"]), 3)} for item in texts(6)]
    sums(objective, before, items, Collate(0))([0])
    rows = [row[row != 0] for batch in seen[:-1] for row in batch]
    assert len(rows) > 20
    assert not any(bool((row == 3).all()) for row in rows if len(row) > 2)


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

    objective = Objective(Nine(), classification.loss, torch.device("cpu"))
    objective.public = items = [{"input_ids": np.full(9, 1 + number), "labels": number % 2} for number in range(4)]
    placed = Placed.of(
        Tensors((name, objective.model.get_parameter(name).detach()) for name in ("head.weight", "head.bias")),
        ["head.weight", "head.bias"],
        torch.device("cpu"),
    )
    kinds = Kinds.of(objective, Collate(0))
    kind = kinds(items[0])
    assert isinstance(kind, Padded)
    assert kind.width > 9
    assert not Probing(objective, kinds, placed).of(kind, items[0], 3).padded
    found = Packs.of(objective, Collate(0))(placed, items)
    assert found["head.weight"].shape == (4, 2, 4)
