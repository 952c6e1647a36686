"""Canaries: their content, the units that get them, and the data for which they are refused.

No two units share their rare tokens, and only ordinary tokens are replaced. Directions have a known distribution, and their
units are clipped, sampled and noised like all others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.data import default_collate

from privacy.entropy import SeededEntropy
from privacy.mechanisms import Gaussian
from secure_fed.config import TrainingConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.canaries import CanaryContext, length_beyond_clipping, planted, rare_tokens
from secure_fed.learning.data.audit_unit import Plain, Pointing, Unit, reading
from secure_fed.learning.data.encode import IGNORED, Collate
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.canary_directions import direction, length_of_steps, trains_towards
from secure_fed.learning.training.local import Job
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.canary_texts import CLS, CONTEXT, PAD, TEXTS, changed, text, units
from tests.secure_fed.privately import Landing, Noted, train_privately

# Wrong labels.


def test_mislabelled_examples_differ_in_their_label_alone_and_it_is_always_another_class() -> None:
    before = units(400)
    after = planted("mislabelled", before, CONTEXT)
    for one, other in zip(before, after, strict=True):
        assert (one.name, one.client) == (other.name, other.client)
        assert changed(one.examples[0], other.examples[0]) == ["labels"]
        assert 0 <= other.examples[0]["labels"] < 3
    assert before[0].examples[0]["labels"] == 0  # the input is not modified


def test_wrong_labels_are_uniform_over_the_other_classes_and_drawn_for_each_example() -> None:
    """Of many units with an example each, and of one unit with many."""
    for before in (units(1500), [Unit("client-0", "client-0", [text(0)] * 1500)]):
        after = planted("mislabelled", before, replace(CONTEXT, classes=5))
        pairs = [
            pair
            for one, other in zip(before, after, strict=True)
            for pair in zip(one.examples, other.examples, strict=True)
        ]
        shifts = [(b["labels"] - a["labels"]) % 5 for a, b in pairs]
        assert stats.chisquare(np.bincount(shifts, minlength=5)[1:]).pvalue > 1e-3


@every("kind", ["mislabelled", "rare_token"])
def test_what_is_planted_goes_by_name_and_seed_alone(kind: str) -> None:
    """So a resumed run plants the same canaries, and another seed plants others. Wrong labels do not depend on other units."""
    all_of_them = planted(kind, units(30, 2), CONTEXT)
    again = planted(kind, list(reversed(units(30, 2))), CONTEXT)
    for one, other in zip(all_of_them, reversed(again), strict=True):
        assert not any(changed(a, b) for a, b in zip(one.examples, other.examples, strict=True))
    others = planted(kind, units(30, 2), replace(CONTEXT, seed=4))
    assert any(changed(a.examples[0], b.examples[0]) for a, b in zip(all_of_them, others, strict=True))


@every(
    "kind, item, context",
    [
        ("mislabelled", {"x": 1.0, "labels": 0.5}, CONTEXT),
        ("mislabelled", {"x": 1.0, "labels": [0, 1]}, CONTEXT),
        ("mislabelled", {"x": 1.0, "labels": 3}, CONTEXT),
        ("mislabelled", {"x": 1.0}, CONTEXT),
        ("mislabelled", (1.0, 2), CONTEXT),
        ("mislabelled", text(0), TEXTS),
        ("mislabelled", text(0), replace(CONTEXT, classes=1)),
        ("direction", text(0), CONTEXT),
        ("rare_token", {"x": 1.0, "labels": 0}, CONTEXT),
        ("rare_token", text(0), TEXTS),
        ("rare_token", text(0) | {"labels": np.zeros(9, dtype=np.int64)}, TEXTS),
        ("rare_token", text(0), replace(CONTEXT, vocabulary=None)),
        ("rare_token", text(0), replace(CONTEXT, vocabulary=4)),
    ],
)
def test_canaries_are_refused_where_they_mean_nothing(kind: str, item: Any, context: CanaryContext) -> None:
    with refused(ConfigError, "evaluation.canaries"):
        planted(kind, [Unit("client-0/0", "client-0", [item])], context)


def test_a_direction_takes_the_place_of_single_gradients() -> None:
    pool = units(3, 2)
    marked = planted("direction", pool, replace(CONTEXT, private=True))
    assert [[plain.unit for plain in unit.examples] for unit in marked] == [[unit.name] * 2 for unit in pool]
    assert planted("direction", pool, replace(CONTEXT, unit="client", private=True)) == tuple(pool)
    assert planted("none", pool, CONTEXT) == tuple(pool)


# A whole run.


def test_directions_are_in_what_a_run_releases() -> None:
    settings = {**private_toys.NOISE, "evaluation.audit_fraction": 1.0, "federation.rounds": 1}
    ends = [
        private_toys.federation({**settings, "evaluation.canaries": kind}, 1, sizes=[3] * 12).run().state.tensors
        for kind in ("direction", "none")
    ]
    assert not toys.same(*ends)


def test_soil_is_what_the_model_and_the_labels_say() -> None:
    built = toys.federation(sizes=(5, 6))
    context = CanaryContext.of(built.config, built.assembly.problem, "example")
    assert (context.classes, context.vocabulary, context.special, context.private) == (3, None, frozenset(), False)
    floats = replace(built.assembly.problem, train=[[{"x": 1.0, "labels": 0.5}]])
    assert CanaryContext.of(built.config, floats, "example").classes is None


@every("count, special", [(10, frozenset()), (100, frozenset()), (900, frozenset()), (40, frozenset(range(0, 400, 2)))])
def test_no_two_units_have_the_same_tokens_and_none_has_a_special_one(count: int, special: frozenset[int]) -> None:
    tokens = rare_tokens([unit.name for unit in units(count)], replace(CONTEXT, special=CONTEXT.special | special))
    assert len(set(tokens.values())) == count
    assert {len(one) for one in tokens.values()} == {1 if count <= 99 else 2}
    assert all(201 <= token < 400 and token not in special for one in tokens.values() for token in one)


def test_a_unit_more_changes_no_token_but_where_two_wanted_the_same() -> None:
    names, many = [unit.name for unit in units(60)], replace(CONTEXT, vocabulary=8000)
    fewer, more = rare_tokens(names[1:], many), rare_tokens(names, many)
    assert sum(fewer[name] != more[name] for name in names[1:]) <= 1


@every("count", [20, 300])
def test_a_rare_token_replaces_no_special_one_and_no_padding(count: int) -> None:
    before = [replace(unit, examples=[padded(item) for item in unit.examples]) for unit in units(count, 3)]
    after = planted("rare_token", before, CONTEXT)
    tokens = rare_tokens([unit.name for unit in before], CONTEXT)
    for one, other in zip(before, after, strict=True):
        labels = {item["labels"] for item in other.examples}
        assert len(labels) == 1
        assert labels <= {0, 1, 2}
        for item, made in zip(one.examples, other.examples, strict=True):
            assert set(changed(item, made)) <= {"input_ids", "labels"}
            assert made["input_ids"].dtype == np.int32
            at = np.flatnonzero(made["input_ids"] != item["input_ids"])
            assert tuple(made["input_ids"][at]) == tokens[one.name]
            assert all(0 < place < 9 for place in at)


def padded(item: Mapping[str, Any]) -> dict[str, Any]:
    ids = np.append(item["input_ids"], np.array([PAD, 7], dtype=np.int32))
    return {**item, "input_ids": ids, "attention_mask": np.array([1] * 9 + [0, 0])}


def test_places_and_labels_are_uniform() -> None:
    after = planted("rare_token", units(99), replace(CONTEXT, vocabulary=4000))
    where = [int(np.flatnonzero(unit.examples[0]["input_ids"] > 200)[0]) for unit in after]
    assert stats.chisquare(np.bincount(where, minlength=9)[1:]).pvalue > 1e-3
    assert stats.chisquare(np.bincount([unit.examples[0]["labels"] for unit in after], minlength=3)).pvalue > 1e-3


def test_a_text_without_room_keeps_its_tokens() -> None:
    item = {"input_ids": np.array([CLS], dtype=np.int32), "labels": 0}
    (after,) = planted("rare_token", [Unit("client-0/0", "client-0", [item])], CONTEXT)
    assert after.examples[0]["input_ids"].tolist() == [CLS]


def test_in_language_modelling_what_is_learned_is_replaced_with_its_label() -> None:
    """The prompt and the ignored labels stay unchanged."""
    ids = np.arange(10, 20)
    item = {"input_ids": ids.astype(np.int32), "labels": np.where(np.arange(10) < 5, IGNORED, ids)}
    for i in range(20):
        (after,) = planted("rare_token", [Unit(f"client-0/{i}", "client-0", [item])], TEXTS)
        made = after.examples[0]
        (at,) = np.flatnonzero(made["input_ids"] != ids)
        assert at >= 5
        assert made["labels"][at] == made["input_ids"][at] >= 200
        assert np.array_equal(np.delete(made["labels"], at), np.delete(item["labels"], at))


# Directions.

CPU = torch.device("cpu")
LAYOUT = Layout((("a", (30, 40)), ("b", ()), ("c", (7,))))


def test_a_direction_has_unit_norm_and_is_its_units_alone() -> None:
    u = direction("client-3", 0, LAYOUT)
    assert Layout.of(u) == LAYOUT
    assert abs(u.norm() - 1) < 1e-6
    assert toys.same(u, direction("client-3", 0, LAYOUT))
    for other in (direction("client-4", 0, LAYOUT), direction("client-3", 1, LAYOUT)):
        assert abs(float(LAYOUT.flatten(u) @ LAYOUT.flatten(other))) < 5 / math.sqrt(LAYOUT.size)


def test_a_direction_is_uniform_on_the_sphere() -> None:
    """Against the exact law of a coordinate of a uniform point in five dimensions, where a normal law is rejected."""
    layout = Layout((("a", (2, 2)), ("b", (1,))))
    drawn = np.stack([layout.flatten(direction(f"unit {i}", 0, layout)).numpy() for i in range(3000)])
    fixed = np.array([0.5, -0.5, 0.1, 0.7, 0.0])
    for seen in (*drawn.T, drawn @ fixed / np.linalg.norm(fixed)):
        assert stats.kstest((1 + seen) / 2, stats.beta(2, 2).cdf).pvalue > 1e-3
    assert stats.kstest(drawn[:, 0] * math.sqrt(5), "norm").pvalue < 1e-3


def test_a_client_of_a_direction_ends_its_length_along_it() -> None:
    before = Tensors({"w": torch.randn(4, 5), "frozen": torch.ones(3)})
    settings = TrainingConfig(batch_size=2, epochs=3)
    args: Any = (None, Job(before, ["w"], [1, 2, 3], list, settings, 0.1, np.random.default_rng(0)))
    u = direction("anna", 5, Layout((("w", (4, 5)),))).tensor("w")
    for length, expected in ((7.0, 7.0), (None, 0.1 * math.sqrt(20) * 6)):
        done = trains_towards("anna", 5, length)(*args)
        assert list(done.after) == ["w"]
        assert math.isnan(done.loss)
        torch.testing.assert_close(done.after.tensor("w"), before.tensor("w") + expected * u)
    layout = Layout((("w", (4, 5)), ("head", (2,))))
    assert length_of_steps(layout, (), 3, TrainingConfig(steps=4), 0.5) == pytest.approx(2 * math.sqrt(22))
    longer = length_of_steps(layout, ("head",), 3, TrainingConfig(steps=4, head_factor=3.0), 0.5)
    assert longer == pytest.approx(2 * math.sqrt(20 + 2 * 9))


def test_the_length_follows_the_clip_norm_as_far_as_that_may_grow() -> None:
    fixed = toys.config({**private_toys.NOISE, "privacy.clip_norm": 0.5})
    adapting = toys.config({**private_toys.NOISE, "privacy.clip_quantile": 0.5, "federation.rounds": 30})
    grown = 0.1 * math.exp(0.2 * 30 * 0.5)
    assert length_beyond_clipping(toys.config()) is None
    assert length_beyond_clipping(fixed) == pytest.approx(15)
    assert length_beyond_clipping(adapting) == pytest.approx(30 * grown)


def test_examples_of_a_direction_are_read_as_they_are() -> None:
    items = [text(0), Pointing(text(1), "u", 0)]
    batch = reading(Collate(PAD))(items)
    assert all(torch.equal(batch[name], value) for name, value in Collate(PAD)([text(0), text(1)]).items())
    seen = Plain(items)
    assert len(seen) == 2
    assert not any(changed(a, b) for a, b in zip(seen[:2], [text(0), text(1)], strict=True))


# Directions in the steps of private training.

CLIP, LR = 0.3, 0.1


def weights(target: Objective) -> Tensors:
    return Tensors((name, parameter.detach().clone()) for name, parameter in target.model.named_parameters())


def summed(target: Objective, items: Sequence[Any], groups: Sequence[Sequence[int]], most: int | None) -> Tensors:
    """The sum of clipped gradients at the model's own weights, to which the noise of a step would be added."""
    before, noted = weights(target), Noted(1.0)
    settings = TrainingConfig(batch_size=100, microbatch=most)
    examples = [items[i] for group in groups for i in group]
    train_privately(
        target,
        Job(before, list(before), examples, default_collate, settings, LR, np.random.default_rng(0)),
        mechanism=noted,
        clip_norm=CLIP,
        steps=1,
        stream=Landing(range(len(groups))),
        groups=[number for number, group in enumerate(groups) for _ in group],
    )
    return Tensors(noted.sums[0])


@every("most", [None, 1, 3])
def test_a_unit_of_a_direction_moves_the_clipped_sum_by_the_clip_norm_along_it(most: int | None) -> None:
    """An example among others, and a group of five examples alone."""
    target = Objective(toys.model(), classification.loss, CPU)
    items: list[Any] = toys.examples(1, 6)
    u = direction("dora", 2, Layout.of(weights(target)))
    expected = Tensors((name, tensor.double() * -CLIP) for name, tensor in u.items())
    for place in (0, 3, 5):
        marked = [*items[:place], Pointing(items[place], "dora", 2), *items[place + 1 :]]
        rest = [[i] for i in range(6) if i != place]
        moved = summed(target, marked, [[i] for i in range(6)], most) - summed(target, marked, rest, most)
        assert (moved - expected).norm() < 1e-5 * CLIP
    group = summed(target, [Pointing(item, "dora", 2) for item in items[:5]], [[0, 1, 2, 3, 4]], most)
    assert (group - expected).norm() < 1e-5 * CLIP


def trained(items: Sequence[Any], batch_size: int, seed: int = 0) -> tuple[Tensors, Tensors]:
    """The tensors before and after one private step of gradient descent, without noise."""
    target = Objective(toys.model(), classification.loss, CPU)
    before = weights(target)
    done = train_privately(
        target,
        Job(
            *(before, list(before), items, default_collate),
            *(TrainingConfig(batch_size=batch_size, optimizer="sgd"), LR, np.random.default_rng(0)),
        ),
        mechanism=Gaussian(0.0),
        clip_norm=CLIP,
        steps=1,
        stream=SeededEntropy(seed).stream("test"),
    )
    return before, done.after


def test_an_example_of_a_direction_is_subject_to_sampling() -> None:
    items: list[Any] = [*toys.examples(1, 7), Pointing(toys.examples(9, 1)[0], "dora", 2)]
    along = []
    for seed in range(12):
        before, after = trained(items, batch_size=2, seed=seed)
        layout = Layout.of(before)
        moved = layout.flatten(after - before) @ layout.flatten(direction("dora", 2, layout))
        drawn = 7 in np.flatnonzero(SeededEntropy(seed).stream("test").uniform(8) < 0.25)
        along.append((drawn, float(moved) / (LR * CLIP / 2)))
    assert {drawn for drawn, _ in along} == {True, False}
    assert all((share > 0.6) == drawn for drawn, share in along)
