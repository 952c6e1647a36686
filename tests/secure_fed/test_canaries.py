"""Canaries: their content, the units that get them, and the data for which they are refused.

No two units share their rare tokens, and only ordinary tokens are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.canaries import CanaryContext, planted, rare_tokens
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.data.encode import IGNORED
from secure_fed.methods.method import State
from tests.secure_fed import private_toys, toys
from tests.secure_fed.canary_texts import CLS, CONTEXT, PAD, TEXTS, changed, text, units

# Wrong labels.


def test_mislabelled_examples_differ_in_their_label_alone_and_it_is_always_another_class() -> None:
    before = units(400)
    after = planted("mislabelled", before, CONTEXT)
    for one, other in zip(before, after, strict=True):
        assert (one.name, one.client) == (other.name, other.client)
        assert changed(one.examples[0], other.examples[0]) == ["labels"]
        assert 0 <= other.examples[0]["labels"] < 3
    assert before[0].examples[0]["labels"] == 0  # the input is not modified


def test_wrong_labels_are_uniform_over_the_other_classes() -> None:
    before = units(1500)
    five = replace(CONTEXT, classes=5)
    after = planted("mislabelled", before, five)
    pairs = zip(before, after, strict=True)
    shifts = [(b.examples[0]["labels"] - a.examples[0]["labels"]) % 5 for a, b in pairs]
    assert stats.chisquare(np.bincount(shifts, minlength=5)[1:]).pvalue > 1e-3


@pytest.mark.parametrize("kind", ["mislabelled", "rare_token"])
def test_what_is_planted_goes_by_name_and_seed_alone(kind: str) -> None:
    """So a resumed run plants the same canaries, and another seed plants others. Wrong labels do not depend on other units."""
    all_of_them = planted(kind, units(30, 2), CONTEXT)
    again = planted(kind, list(reversed(units(30, 2))), CONTEXT)
    for one, other in zip(all_of_them, reversed(again), strict=True):
        assert not any(changed(a, b) for a, b in zip(one.examples, other.examples, strict=True))
    others = planted(kind, units(30, 2), replace(CONTEXT, seed=4))
    assert any(changed(a.examples[0], b.examples[0]) for a, b in zip(all_of_them, others, strict=True))


def test_the_labels_of_one_client_are_drawn_for_each_example() -> None:
    (unit,) = planted("mislabelled", [Unit("client-0", "client-0", [text(0)] * 200)], CONTEXT)
    counts = np.bincount([item["labels"] for item in unit.examples], minlength=3)
    assert counts[0] == 0
    assert stats.binomtest(int(counts[1]), 200, 0.5).pvalue > 1e-3


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"x": 1.0, "labels": 0.5}, "0.5 is not one of 0 to 2"),
        ({"x": 1.0, "labels": [0, 1]}, "is not one of 0 to 2"),
        ({"x": 1.0, "labels": 3}, "3 is not one of 0 to 2"),
        ({"x": 1.0}, "no 'labels'"),
        ((1.0, 2), "one example is a tuple"),
    ],
)
def test_what_has_no_class_is_refused(item: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planted("mislabelled", [Unit("client-0/0", "client-0", [item])], CONTEXT)


def test_a_task_without_classes_has_no_wrong_labels() -> None:
    for context in (TEXTS, replace(CONTEXT, classes=1)):
        with pytest.raises(ConfigError, match="needs a classification task with at least two classes"):
            planted("mislabelled", units(1), context)


def test_single_gradients_are_replaced_only_where_there_are_some() -> None:
    with pytest.raises(ConfigError, match=r"only with privacy\.unit = 'example' or 'group'"):
        planted("direction", units(2), CONTEXT)
    pool = units(3, 2)
    marked = planted("direction", pool, replace(CONTEXT, private=True))
    assert [[plain.unit for plain in unit.examples] for unit in marked] == [[unit.name] * 2 for unit in pool]
    assert planted("direction", pool, replace(CONTEXT, unit="client", private=True)) == tuple(pool)
    assert planted("none", pool, CONTEXT) == tuple(pool)
    with pytest.raises(ConfigError, match="'arrows' is not known"):
        planted("arrows", pool, CONTEXT)


# A whole run.

POOL: dict[str, Any] = {"evaluation.audit_fraction": 1.0, "evaluation.canaries": "direction", "federation.cohort": 3}


def test_a_run_with_directions_is_repeated_to_the_same_bits() -> None:
    settings = {**private_toys.CLIENT, **POOL, "privacy.noise_multiplier": 1.0}
    ends: list[State] = [private_toys.federation(settings, 1, sizes=[3] * 12).run().state for _ in range(2)]
    assert toys.same(ends[0].tensors, ends[1].tensors)
    other = private_toys.federation({**settings, "evaluation.canaries": "none"}, 1, sizes=[3] * 12).run().state
    assert not toys.same(ends[0].tensors, other.tensors)


def test_soil_is_what_the_model_and_the_labels_say() -> None:
    built = toys.federation(sizes=(5, 6))
    context = CanaryContext.of(built.config, built.assembly.problem, "example")
    assert (context.classes, context.vocabulary, context.special, context.private) == (3, None, frozenset(), False)
    floats = replace(built.assembly.problem, train=[[{"x": 1.0, "labels": 0.5}]])
    assert CanaryContext.of(built.config, floats, "example").classes is None


@pytest.mark.parametrize("count", [10, 100, 150, 900])
def test_no_two_units_have_the_same_tokens(count: int) -> None:
    tokens = rare_tokens([unit.name for unit in units(count)], CONTEXT)
    assert len(set(tokens.values())) == count
    assert {len(one) for one in tokens.values()} == {1 if count <= 99 else 2}
    assert all(201 <= token < 400 for one in tokens.values() for token in one)


def test_a_unit_more_changes_no_token_but_where_two_wanted_the_same() -> None:
    names, many = [unit.name for unit in units(60)], replace(CONTEXT, vocabulary=8000)
    fewer, more = rare_tokens(names[1:], many), rare_tokens(names, many)
    assert sum(fewer[name] != more[name] for name in names[1:]) <= 1


def test_special_tokens_are_never_chosen() -> None:
    special = frozenset(range(0, 400, 2))
    tokens = rare_tokens([unit.name for unit in units(40)], replace(CONTEXT, special=special))
    assert not special & {token for one in tokens.values() for token in one}


@pytest.mark.parametrize("count", [20, 300])
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


@pytest.mark.parametrize(
    ("item", "context", "said"),
    [
        ({"x": 1.0, "labels": 0}, CONTEXT, "no 'input_ids', or they are not one sequence"),
        (text(0), TEXTS, "neither a class nor its own tokens"),
        (text(0) | {"labels": np.zeros(9, dtype=np.int64)}, TEXTS, "neither a class nor its own tokens"),
        (text(0), replace(CONTEXT, vocabulary=None), "needs a vocabulary"),
        (text(0), replace(CONTEXT, vocabulary=4), "has 2 ordinary tokens"),
    ],
)
def test_rare_tokens_are_refused_where_they_mean_nothing(item: Any, context: CanaryContext, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        planted("rare_token", [Unit("client-0/0", "client-0", [item])], context)
