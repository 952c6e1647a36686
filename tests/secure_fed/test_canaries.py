"""Canaries: their content, the units that get them, and the data for which they are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats

from secure_fed.errors import ConfigError
from secure_fed.learning.audit_pool.canaries import CanaryContext, planted
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.methods.method import State
from tests.secure_fed import private_toys, toys
from tests.secure_fed.canary_texts import CONTEXT, TEXTS, changed, text, units

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
