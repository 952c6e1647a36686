"""Texts by optimisation: better than the most frequent words on single short texts, which is the only claim."""

from __future__ import annotations

import pytest
import torch

from attacks import gradient_inversion
from attacks.adversary.case import Case, Settings
from attacks.texts.recovery import prior_knowledge
from tests.attacks.federations import case


@pytest.fixture(scope="module")
def short() -> Case:
    """FFA of rank 4: B has too few dimensions for the exact test."""
    return case(clients=2, model__max_length=8, method__name="ffa_lora", method__rank=4, federation__rounds=1)


@pytest.mark.nightly
def test_it_beats_naming_frequent_words(short: Case) -> None:
    found = gradient_inversion.run(short, Settings()).measured
    assert found["exact_applicable"] == 0
    matched = found["matching"]
    assert matched["updates"] == 2
    assert matched["bag_recall"] > matched["baseline"]


def test_the_distance_falls_as_it_looks(short: Case) -> None:
    """The cosine after some steps is better than at the start, and the model's parameters are unchanged."""
    at, one = prior_knowledge(short), short.seen.updates[0]
    before = at.before(0)
    model = short.assembly.objective.load(before).eval()
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    names = [name for name in one.contribution if bool(one.contribution.tensor(name).any())]
    leaves = {name: before.tensor(name).clone().requires_grad_() for name in before}
    loss = gradient_inversion._loss(model, leaves, 0)
    table = model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    target = [-one.contribution.tensor(name) for name in names]

    def reached(steps: int) -> float:
        budget = gradient_inversion.Budget(starts=1, steps=steps)
        start = gradient_inversion._start(table, 8, torch.Generator().manual_seed(0))
        return gradient_inversion._optimised(loss, [leaves[name] for name in names], target, start, table, budget)[1]

    assert reached(12) < reached(1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())


def test_other_optimisers_are_not_tried(short: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gradient_inversion, "_optimised", lambda loss, leaves, target, start, *more: (start, 0.0)
    )  # at once
    assert gradient_inversion._matched(prior_knowledge(short), short.seen.updates) is not None
    adamw = case(clients=2, training__optimizer="adamw", training__lr=0.005, federation__rounds=1)
    assert gradient_inversion._matched(prior_knowledge(adamw), adamw.seen.updates) is None
