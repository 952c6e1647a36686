"""Texts recovered from one update, end to end on the built-in model, and the reasons where nothing can be recovered.

Texts by optimisation: better than the most frequent words on single short texts, which is the only claim.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
import torch

from attacks import gradient_inversion
from attacks.adversary.case import Case, Inapplicable, Settings
from attacks.texts.recovery import GUESSED, USUAL, Common, means, prior_knowledge, recover, score, truth_of
from attacks.texts.span import ANYWHERE, NoFirstLayerError, first_layer
from secure_fed.learning.models.adapters.lora import LoraAdapter
from tests.attacks.federations import case
from tests.secure_fed import small_models


@pytest.fixture(scope="module")
def plain() -> Case:
    """Three clients of one text, SGD, rank 16."""
    return case()


def test_one_text_is_read_word_for_word(plain: Case) -> None:
    """In the first round from B alone, in the second from A too."""
    found = gradient_inversion.run(plain, Settings()).measured
    assert found["updates"] == found["exact_applicable"] == 6
    assert found["recall"] == found["precision"] == 1.0
    assert found["all_rounds"]["recall"] == 1.0


@pytest.mark.nightly
def test_the_most_exposed_update_stands_beside_the_means() -> None:
    """Of clients with four texts each some lose all and others part; names are those of `per_update`."""
    found = gradient_inversion.run(case(each=4, method__rank=32), Settings()).measured
    most, rows = found["most_exposed"], found["per_update"]
    assert most["bag_recall"] == max(row["bag_recall"] for row in rows) > found["bag_recall"] > 0
    (own,) = [row for row in rows if (row["client"], row["round"]) == (most["client"], most["round"])]
    assert most == {name: own[name] for name in most}
    assert {"recall", "precision", "bag_precision"} <= most.keys()
    together = found["all_rounds"]
    assert together["most_exposed"]["client"] in {row["client"] for row in rows}
    assert together["most_exposed"]["bag_recall"] >= together["bag_recall"]
    assert found["most_exposed_guess"]["guessed_bag_recall"] >= found["most_exposed"]["bag_recall"]


def test_the_most_exposed_is_the_one_of_which_most_counts() -> None:
    """An attack that named every word is not the most exposed one."""
    row = {"exact_applicable": True, "why": "", **dict.fromkeys((*GUESSED, *USUAL), 0.0)}
    all_words = {"bag_recall": 1.0, "bag_precision": 0.1, "recall": 1.0, "precision": 0.1}
    some = {"bag_recall": 0.6, "bag_precision": 1.0, "recall": 0.1, "precision": 1.0}
    found = means([{"round": 0, **row, **all_words}, {"round": 1, **row, **some}])
    assert found["most_exposed"] == {"round": 1, **some}
    assert means([{**row, **some, "exact_applicable": False}])["most_exposed"] is None


def test_a_wrong_text_is_not_what_is_found(plain: Case) -> None:
    """The score can be low: another client's text is not in the update."""
    at, one = prior_knowledge(plain), plain.seen.updates[0]
    found = recover([[at.sent(one)]], at.first, at.scale, at.known, 1)[0]
    assert at.scored(found, [one.client])["recall"] == 1.0
    other = at.scored(found, [plain.seen.updates[1].client])
    assert other["recall"] < 1
    assert other["precision"] < 1


def test_ffa_sends_b_and_shows_fewer_inputs_than_its_rank() -> None:
    found = gradient_inversion.run(case(method__name="ffa_lora"), Settings()).measured
    assert found["recall"] == found["precision"] == 1.0
    short = case(method__name="ffa_lora", method__rank=8, training__steps=2)
    with pytest.raises(Inapplicable, match=r"applies to none of the \d+ updates .* every candidate would pass"):
        gradient_inversion.run(short, Settings())


def test_fra_shows_its_factors_in_the_clear() -> None:
    found = gradient_inversion.run(case(method__name="fra_lora"), Settings()).measured
    assert found["recall"] == found["precision"] == 1.0


def test_a_step_of_adamw_gives_its_gradient_away() -> None:
    """In the second round, from A. In the first one B's gradients are too large to come back but for some per cent; so are A's
    in the second, if the head has made longer steps.
    """
    settings = {"training__optimizer": "adamw", "training__lr": 0.005, "training__head_factor": 1.0}
    found = gradient_inversion.run(case(**settings), Settings()).measured
    second = [row for row in found["per_update"] if row["round"] == 1]
    assert len(second) == 3
    assert all(row["exact_applicable"] and row["bag_precision"] == 1.0 for row in second)
    assert min(row["bag_recall"] for row in second) >= 0.7


@pytest.mark.parametrize("head_factor", [1.0, 3.0])
def test_longer_steps_of_the_head_are_not_taken_for_a_scaled_update(head_factor: float) -> None:
    of = case(training__optimizer="adamw", training__lr=0.005, training__head_factor=head_factor)
    assert of.assembly.problem.last
    assert {prior_knowledge(of).sent(one).factor for one in of.seen.updates} == {1.0}


@pytest.mark.parametrize("more", [{"training__steps": 2}, {"training__weight_decay": 0.01}])
def test_other_steps_of_adamw_are_found_out(more: dict[str, Any]) -> None:
    found = gradient_inversion.run(case(training__optimizer="adamw", training__lr=0.005, **more), Settings()).measured
    assert found["exact_applicable"] == 0
    assert found["recall"] is None
    assert found["precision"] is None
    assert found["most_exposed"] is None


@pytest.mark.nightly
def test_guesses_stand_beside_what_the_commonest_words_give() -> None:
    """A client's guesses, beside as many of the commonest pairs and tokens of public texts, on that client's own texts."""
    short = case(each=4, method__rank=8)  # of more words than the exact test can tell
    found, at = gradient_inversion.run(short, Settings()).measured, prior_knowledge(short)
    row, one = found["per_update"][-1], gradient_inversion.picked(short, Settings())[-1]
    guessed = {
        key
        for key in recover([[at.sent(one)]], at.first, at.scale, at.known, at.each)[0].guessed
        if key[1] not in at.special
    }
    texts = [[int(token) for token in example["input_ids"]] for example in short.population]
    pairs = {key for key in at.truth([one.client]) if key[1] not in at.special}
    tokens = {token for _, token in pairs}
    usual = commonest([set(text) for text in texts], at.special)[: len({token for _, token in guessed})]
    assert guessed
    assert row["why"]
    assert row["guessed_bag_precision"] > 0.5
    assert row["baseline_bag_recall"] == pytest.approx(len(tokens & set(usual)) / len(tokens))
    usual_pairs = commonest([{*enumerate(text)} for text in texts], at.special)[: len(guessed)]
    assert row["baseline_recall"] == pytest.approx(len(pairs & set(usual_pairs)) / len(pairs))
    every = [one["baseline_bag_recall"] for one in found["per_update"]]
    assert found["baseline_bag_recall"] == pytest.approx(sum(every) / len(every))


def commonest(texts: list[set[Any]], special: Collection[int]) -> list[Any]:
    """The tokens (or pairs) that occur in the most texts; ties by the smaller value."""
    every = sorted(
        {one for text in texts for one in text if (one[1] if isinstance(one, tuple) else one) not in special}
    )
    return sorted(every, key=lambda one: -sum(one in text for text in texts))


def test_the_commonest_are_those_in_most_texts(plain: Case) -> None:
    """Repetitions within one text do not count, nor do special tokens."""
    common = Common.of([[2, 5, 7, 7, 7], [2, 5, 8], [2, 9, 8, 5]], prior_knowledge(plain).first, {2})
    assert common.tokens[:2] == [5, 8]
    assert common.pairs[0] == (1, 5)
    assert common.beside({(1, 5), (4, 7), (0, 2)}, {(1, 5), (2, 8), (3, 9)}, {2}) == pytest.approx((2 / 3, 2 / 3))


@pytest.mark.nightly
def test_several_local_steps_stay_in_the_span() -> None:
    found = gradient_inversion.run(case(training__steps=3, training__lr=0.3), Settings()).measured
    assert found["per_update"][0]["recall"] == 1.0


def test_clipping_does_not_protect(plain: Case) -> None:
    at, one = prior_knowledge(plain), plain.seen.updates[3]
    clipped = type(at.sent(one))(one.contribution * 0.3, at.before(one.round))
    found = recover([[clipped]], at.first, at.scale, at.known, 1)[0]
    assert at.scored(found, [one.client])["recall"] == 1.0


def test_what_is_not_recorded_cannot_be_inverted(plain: Case) -> None:
    with pytest.raises(Inapplicable, match=r"evaluation\.record = 'updates'"):
        gradient_inversion.run(case("secure_server", clients=2), Settings())


def test_methods_without_factors_are_inapplicable() -> None:
    with pytest.raises(Inapplicable, match="no factors A and B"):
        gradient_inversion.run(
            case(clients=2, method__name="bitfit", method__rank=8, method__target_modules=""), Settings()
        )


@pytest.mark.parametrize("architecture", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_candidates_are_what_the_first_layers_read(architecture: str) -> None:
    """Every token of a text, looked up by its key, is the input that a hook of the test's own sees."""
    model = small_models.make(architecture)
    names = list(LoraAdapter(rank=2).prepare(model, small_models.head_of(model), 0))
    first = first_layer(model, names, 9)
    blocks = list(first.blocks())
    keys, inputs = torch.cat([block[0] for block in blocks]), torch.cat([block[1] for block in blocks])
    table = {tuple(key): value for key, value in zip(keys.tolist(), inputs, strict=True)}
    seen: list[torch.Tensor] = []
    layer = model.get_submodule(first.pairs[0].module)
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    small_models.logits(model)
    handle.remove()
    ids = small_models.batch()["input_ids"]
    for text, row in zip(ids[:2], seen[0][:2], strict=True):
        for place, token in enumerate(text.tolist()):
            assert torch.allclose(table[first.key(place, token)], row[place], atol=1e-5)
    assert (first.key(3, 1)[0] == ANYWHERE) == (architecture == "llama")


def test_layers_behind_others_are_not_first_layers() -> None:
    model = small_models.make("bert")
    adapter = LoraAdapter(rank=2, target_modules=r".*layer\.1\..*(query|value)")
    names = list(adapter.prepare(model, small_models.head_of(model), 0))
    with pytest.raises(NoFirstLayerError, match="made of the whole text"):
        first_layer(model, names, 9)


def test_scores_count_pairs_and_tokens() -> None:
    truth = {(0, 2), (1, 7), (2, 8), (3, 7), (4, 3)}
    found = {(0, 2), (1, 7), (2, 9), (1, 8)}
    told = score(found, truth, {2, 3})
    assert (told.true, told.found) == (3, 3)
    assert told.recall == pytest.approx(1 / 3)
    assert told.precision == pytest.approx(1 / 3)
    assert told.bag_recall == 1.0
    assert told.bag_precision == pytest.approx(2 / 3)
    assert score(set(), truth, {2, 3}).precision is None


def test_truth_is_the_clients_pairs(plain: Case) -> None:
    at = prior_knowledge(plain)
    assert truth_of([[5, 6], [5, 7]], at.first) == {(0, 5), (1, 6), (1, 7)}


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
