"""Texts recovered from one update, exactly and by optimisation, and from secure sums; and label counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from attacks import gradient_inversion, label_counts, sum_inversion
from attacks.adversary.case import Case, Inapplicable, Settings, Target
from attacks.audit import audited
from attacks.report import page
from attacks.report.sentences import texts
from attacks.texts.recovery import GUESSED, USUAL, Common, means, prior_knowledge, recover, score, truth_of
from attacks.texts.span import ANYWHERE, NoFirstLayerError, first_layer
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.methods.method import State
from secure_fed.runs.recording import Recorded
from tests.attacks.federations import case
from tests.golden import refused
from tests.secure_fed import small_models


@pytest.fixture(scope="module")
def plain() -> Case:
    """Three clients of one text, SGD, rank 16."""
    return case()


def read(of: Case) -> Any:
    return gradient_inversion.run(of, Settings()).measured


@pytest.mark.parametrize("method", ["fedlora", "ffa_lora", "fra_lora"])
def test_one_text_is_read_word_for_word(plain: Case, method: str) -> None:
    """In the first round from B alone, in the second from A too; FFA sends B alone, and FRA shows its factors in the clear."""
    found = read(plain if method == "fedlora" else case(clients=1, method__name=method))
    assert found["updates"] == found["exact_applicable"] == (6 if method == "fedlora" else 2)
    assert found["recall"] == found["precision"] == found["all_rounds"]["recall"] == 1.0


def test_the_most_exposed_is_the_one_of_which_most_counts() -> None:
    """An attack that named every word is not the most exposed one."""
    row = {"exact_applicable": True, "why": "", **dict.fromkeys((*GUESSED, *USUAL), 0.0)}
    all_words = {"bag_recall": 1.0, "bag_precision": 0.1, "recall": 1.0, "precision": 0.1}
    some = {"bag_recall": 0.6, "bag_precision": 1.0, "recall": 0.1, "precision": 1.0}
    found = means([{"round": 0, **row, **all_words}, {"round": 1, **row, **some}])
    assert found["most_exposed"] == {"round": 1, **some}
    assert means([{**row, **some, "exact_applicable": False}])["most_exposed"] is None


def test_a_wrong_text_is_not_what_is_found(plain: Case) -> None:
    """The score can be low: another client's text is not in the update. Clipping does not protect."""
    at, one = prior_knowledge(plain), plain.seen.updates[0]
    found = recover([[at.sent(one)]], at.first, at.scale, at.known, 1)[0]
    assert at.scored(found, [one.client])["recall"] == 1.0
    other = at.scored(found, [plain.seen.updates[1].client])
    assert other["recall"] < 1
    assert other["precision"] < 1
    clipped = type(at.sent(one))(one.contribution * 0.3, at.before(one.round))
    found = recover([[clipped]], at.first, at.scale, at.known, 1)[0]
    assert at.scored(found, [one.client])["recall"] == 1.0


@pytest.mark.parametrize(
    ("vantage", "settings"),
    [
        ("secure_server", {}),  # it records no updates
        ("server", {"method__name": "bitfit", "method__rank": 8, "method__target_modules": ""}),  # no factors
        ("server", {"method__name": "ffa_lora", "method__rank": 8, "training__steps": 2}),  # more inputs than its rank
    ],
    ids=["masks", "no factors", "rank"],
)
def test_where_it_does_not_apply_it_says_why(vantage: str, settings: dict[str, Any]) -> None:
    with refused(Inapplicable):
        gradient_inversion.run(case(vantage, clients=2, **settings), Settings())


ADAMW = {"training__optimizer": "adamw", "training__lr": 0.005}


@pytest.mark.parametrize("head_factor", [1.0, 3.0])
def test_a_step_of_adamw_gives_its_gradient_away(head_factor: float) -> None:
    """In the second round, from A. In the first one B's gradients are too large to come back but for some per cent; so are A's
    in the second, if the head has made longer steps. These are not taken for a scaled update.
    """
    of = case(clients=2, **ADAMW, training__head_factor=head_factor)
    assert of.assembly.problem.last
    assert {prior_knowledge(of).sent(one).factor for one in of.seen.updates} == {1.0}
    if head_factor == 1.0:
        second = [row for row in read(of)["per_update"] if row["round"] == 1]
        assert len(second) == 2
        assert all(row["exact_applicable"] and row["bag_precision"] == 1.0 for row in second)
        assert min(row["bag_recall"] for row in second) >= 0.7


@pytest.mark.parametrize("more", [{"training__steps": 2}, {"training__weight_decay": 0.01}], ids=["two", "decay"])
def test_other_steps_of_adamw_are_found_out(more: dict[str, Any]) -> None:
    found = read(case(clients=1, **ADAMW, **more))
    assert found["exact_applicable"] == 0
    assert found["recall"] is found["precision"] is found["most_exposed"] is None


def test_the_commonest_are_those_in_most_texts(plain: Case) -> None:
    """Repetitions within one text do not count, nor do special tokens."""
    common = Common.of([[2, 5, 7, 7, 7], [2, 5, 8], [2, 9, 8, 5]], prior_knowledge(plain).first, {2})
    assert common.tokens[:2] == [5, 8]
    assert common.pairs[0] == (1, 5)
    assert common.beside({(1, 5), (4, 7), (0, 2)}, {(1, 5), (2, 8), (3, 9)}, {2}) == pytest.approx((2 / 3, 2 / 3))


@pytest.mark.nightly
def test_several_local_steps_stay_in_the_span() -> None:
    assert read(case(training__steps=3, training__lr=0.3))["per_update"][0]["recall"] == 1.0


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
    for text, row in zip(small_models.batch()["input_ids"][:2], seen[0][:2], strict=True):
        for place, token in enumerate(text.tolist()):
            assert torch.allclose(table[first.key(place, token)], row[place], atol=1e-5)
    assert (first.key(3, 1)[0] == ANYWHERE) == (architecture == "llama")
    if architecture == "bert":  # layers behind others are no first layers
        with refused(NoFirstLayerError):
            first_layer(model, [name for name in names if "layer.1." in name], 9)


def test_scores_count_pairs_and_tokens(plain: Case) -> None:
    truth = {(0, 2), (1, 7), (2, 8), (3, 7), (4, 3)}
    told = score({(0, 2), (1, 7), (2, 9), (1, 8)}, truth, {2, 3})
    assert (told.true, told.found) == (3, 3)
    assert told.recall == pytest.approx(1 / 3)
    assert told.precision == pytest.approx(1 / 3)
    assert told.bag_recall == 1.0
    assert told.bag_precision == pytest.approx(2 / 3)
    assert score(set(), truth, {2, 3}).precision is None
    assert truth_of([[5, 6], [5, 7]], prior_knowledge(plain).first) == {(0, 5), (1, 6), (1, 7)}


@pytest.fixture(scope="module")
def short() -> Case:
    """FFA of rank 4: B has too few dimensions for the exact test."""
    return case(clients=2, model__max_length=8, method__name="ffa_lora", method__rank=4, federation__rounds=1)


@pytest.mark.nightly
def test_it_beats_naming_frequent_words(short: Case) -> None:
    found = read(short)
    assert found["exact_applicable"] == 0
    matched = found["matching"]
    assert matched["updates"] == 2
    assert matched["bag_recall"] > matched["baseline"]


def test_the_distance_falls_as_it_looks(short: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cosine after some steps is better than at the start, and the model's parameters are unchanged. Other optimisers are
    not tried.
    """
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
    monkeypatch.setattr(gradient_inversion, "_optimised", lambda loss, leaves, target, start, *more: (start, 0.0))
    assert gradient_inversion._matched(at, short.seen.updates) is not None
    adamw = case(clients=1, **ADAMW, federation__rounds=1)
    assert gradient_inversion._matched(prior_knowledge(adamw), adamw.seen.updates) is None


# Sums.


@pytest.fixture(scope="module")
def several() -> Case:
    return case(clients=10, method__rank=16)


@pytest.fixture(scope="module")
def pair() -> Case:
    return case(clients=2, method__rank=32)


def behind_masks(of: Case, **sums: Any) -> Case:
    return replace(of, seen=replace(of.seen, vantage="secure_server", updates=(), **sums))


def test_the_sum_of_two_is_inverted_as_a_batch_of_two(pair: Case) -> None:
    """Its tokens are found, without their clients."""
    found = sum_inversion.run(behind_masks(pair), Settings()).measured
    assert found["sums"] == 2
    assert found["per_sum"][0]["bag_recall"] == 1.0
    assert "by_cohort" not in found  # behind masks single updates are not seen


def test_an_audit_of_recorded_updates_shows_the_recall_by_cohort(pair: Case) -> None:
    """The server that reads single updates has the figures of the sum once more, with the recall by cohort beside them."""
    recorded = Recorded(pair.seen.states, pair.seen.updates, lr=pair.seen.lr)
    final = State(pair.seen.final, round=2)
    audit = audited(Target(pair.assembly, final, recorded, {}), ["sum_inversion"], Settings(references=0))
    behind, single = (cell["measured"] for cell in audit["cells"] if cell["vantage"] in ("secure_server", "server"))
    assert single == behind | {"by_cohort": {"1": 1.0, "2": behind["recall"]}}
    html = page.page(audit.record)
    assert "recall with position, 1 client in a sum 100.0 %" in html
    assert "recall with position, 2 clients in a sum " in html
    assert texts(audit.record).count(" named ") == 1, "equal figures of two adversaries have one sentence"


@pytest.mark.nightly
def test_recall_fades_with_the_cohort(several: Case) -> None:
    by_cohort = sum_inversion.run(several, Settings()).measured["by_cohort"]
    assert list(by_cohort) == ["1", "2", "5", "10"]
    assert by_cohort["1"] == 1.0
    assert by_cohort["10"] < by_cohort["2"] <= 1.0
    assert by_cohort["10"] <= 0.2


def test_recall_is_of_those_who_are_in_a_sum() -> None:
    """Two of six clients are drawn in a round, by public coins: what comes back is of theirs."""
    of = case("secure_server", clients=6, federation__cohort=2, method__rank=32)
    found = sum_inversion.run(of, Settings()).measured
    assert found["cohorts_known"] is True
    assert found["per_sum"][0]["bag_recall"] == 1.0
    assert found["most_exposed"]["bag_recall"] == 1.0
    assert [row["clients"] for row in found["per_sum"]] == [2, 2]


def test_of_whom_is_left_open_where_one_of_the_cohort_is_missing(pair: Case) -> None:
    short = behind_masks(pair, sums=[replace(one, clients=1) for one in pair.seen.sums])
    finding = sum_inversion.run(short, Settings())
    assert finding.measured["cohorts_known"] is False
    assert "too low" in finding.note
    assert "too low" not in sum_inversion.run(behind_masks(pair), Settings()).note


def test_groups_share_no_update_and_without_sums_it_is_inapplicable(several: Case) -> None:
    own = [one for one in several.seen.updates if one.round == 0]
    groups = sum_inversion.groups_of(own, 3)
    names = [one.client for group in groups for one in group]
    assert [len(group) for group in groups] == [3, 3, 3]
    assert len(set(names)) == 9
    with refused(Inapplicable):
        sum_inversion.run(behind_masks(several, sums=()), Settings())


# Label counts from the change of a bias.


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20), st.integers(0, 2**31), st.floats(1e-3, 2))
def test_shares_are_exact_where_the_mean_probability_is_known(labels: list[int], seed: int, lr: float) -> None:
    """The step of SGD is computed by autograd."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(labels), 5, dtype=torch.float64, generator=generator)
    bias = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    F.cross_entropy(logits + bias, torch.tensor(labels)).backward()
    assert bias.grad is not None
    found = label_counts.shares(-lr * bias.grad.numpy(), logits.softmax(1).mean(0).numpy(), lr, 1)
    assert found == pytest.approx(np.bincount(labels, minlength=5) / len(labels), abs=1e-9)


def test_shares_stay_shares_and_their_scale_matters() -> None:
    """With a wrong mean probability, some shares would be negative. A variant that forgets the number of steps is caught."""
    found = label_counts.shares(np.array([-1.0, 0.2, 0.8]), np.array([0.1, 0.1, 0.8]), 1.0, 1)
    assert found.min() == 0
    assert found.sum() == pytest.approx(1)
    assert label_counts.shares(np.full(4, -9.0), np.full(4, 0.25), 1.0, 1).tolist() == [0.25] * 4
    change, mean, true = np.array([-0.25, 0.05, 0.2]), np.array([0.5, 0.3, 0.2]), np.array([0.25, 0.35, 0.4])
    assert label_counts.l1(label_counts.shares(change, mean, 1.0, 1), true) < 1e-9
    assert label_counts.l1(label_counts.shares(change, mean, 1.0, 4), true) > 0.3


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_known_batches_are_counted_better_than_by_the_population(factor: float) -> None:
    """Clients of eight examples and skewed labels; whatever rate the head's last layer has of its own."""
    more = {"training__lr": 0.1 / factor, "training__head_factor": factor}
    skewed = case(clients=6, each=8, data__partition="dirichlet", data__alpha=0.3, **more)
    found = label_counts.run(skewed, Settings()).measured
    assert found["clients"] == 6
    assert found["l1_error"] < 0.1
    assert found["baseline_l1"] > 4 * found["l1_error"]


def test_steps_whose_rate_falls_are_counted_by_their_mean_rate() -> None:
    """Four steps at 1, 3/4, 2/4 and 1/4 of the rate, too short to move the probabilities."""
    falls = {"training__lr_schedule": "linear", "federation__rounds": 1, "training__steps": 4, "training__lr": 0.005}
    found = label_counts.run(case(clients=6, each=8, data__partition="dirichlet", data__alpha=0.3, **falls), Settings())
    assert found.measured["l1_error"] < 0.1


@pytest.mark.parametrize(
    "settings",
    [
        {"training__optimizer": "adamw"},
        {"training__momentum": 0.9},
        {"training__max_grad_norm": 0.01},
        {"training__proximal": 40.0},
        {"method__personal": ("classifier.*",)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_it_says_where_it_does_not_apply(settings: dict[str, object]) -> None:
    with refused(Inapplicable):
        label_counts.run(case(clients=1, federation__rounds=1, **settings), Settings())
