"""Texts recovered from one update, exactly and by optimisation, and from secure sums; label counts; and the noise in them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as tried
from hypothesis import strategies as st
from torch.nn import functional as F

from attacks import gradient_inversion, label_counts, sum_inversion
from attacks.adversary.case import Case, Inapplicable, Seen, Settings, Target
from attacks.audit import audited
from attacks.report import page
from attacks.report.sentences import texts
from attacks.texts.recovery import (
    GUESSED,
    USUAL,
    Common,
    grid_noise,
    means,
    prior_knowledge,
    recover,
    score,
    sum_noise,
    truth_of,
    update_noise,
)
from attacks.texts.span import ANYWHERE, NoFirstLayerError, first_layer
from privacy.entropy import SeededEntropy
from secure_fed import Federation, RunConfig
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.methods.method import State
from secure_fed.rounds.masked.encoding_plan import Contribution
from secure_fed.runs.recording import Recorded, Summed
from secure_fed.tensors.tensors import Tensors
from tests.attacks import canaried
from tests.attacks.federations import case, seen
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import small_models, toys


@pytest.fixture(scope="module")
def plain() -> Case:
    """Three clients of one text, SGD, rank 16."""
    return case()


def read(of: Case) -> Any:
    return gradient_inversion.run(of, Settings()).measured


def with_setting(of: Case, name: str, value: Any) -> Case:
    """As if its clients had been asked to train with another setting."""
    config = of.assembly.config.replace({("training", "momentum"): 0.0, ("training", name): value})
    return replace(of, assembly=replace(of.assembly, config=config))


def behind_masks(of: Case, **sums: Any) -> Case:
    return replace(of, seen=replace(of.seen, vantage="secure_server", updates=(), **sums))


@pytest.mark.parametrize("method", chosen(["fedlora", "ffa_lora", "fra_lora"], ["fedlora", "fra_lora"]))
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


def test_where_it_does_not_apply_it_says_why(plain: Case) -> None:
    """Without single updates, without factors, and with more inputs than the rank."""
    small = {"clients": 1, "federation__rounds": 1, "method__rank": 8}
    for of in (
        behind_masks(plain),
        case(**small, method__name="bitfit", method__target_modules=""),
        case(**small, method__name="ffa_lora", training__steps=2),
    ):
        with refused(Inapplicable):
            gradient_inversion.run(of, Settings())


ADAMW = {"training__optimizer": "adamw", "training__lr": 0.005}


@pytest.mark.parametrize("head_factor", chosen([1.0, 3.0], [1.0]))
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


@pytest.mark.parametrize(
    "more",
    chosen([{"training__steps": 2}, {"training__weight_decay": 0.01}], [{"training__steps": 2}]),
    ids=["two", "decay"],
)
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
        start = table[torch.randint(len(table), (8,), generator=torch.Generator().manual_seed(0))]
        return gradient_inversion._optimised(loss, [leaves[name] for name in names], target, start, table, budget)[1]

    assert reached(12) < reached(1)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    monkeypatch.setattr(gradient_inversion, "_optimised", lambda loss, leaves, target, start, *more: (start, 0.0))
    assert gradient_inversion._matched(at, short.seen.updates) is not None
    adamw = with_setting(short, "optimizer", "adamw")
    assert gradient_inversion._matched(prior_knowledge(adamw), adamw.seen.updates) is None


# Sums.


@pytest.fixture(scope="module")
def pair() -> Case:
    return case(clients=2, method__rank=32)


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


def test_groups_share_no_update_and_without_sums_it_is_inapplicable(plain: Case) -> None:
    own = [replace(plain.seen.updates[0], client=f"client-{client}") for client in range(10)]
    groups = sum_inversion.groups_of(own, 3)
    names = [one.client for group in groups for one in group]
    assert [len(group) for group in groups] == [3, 3, 3]
    assert len(set(names)) == 9
    with refused(Inapplicable):
        sum_inversion.run(behind_masks(plain, sums=()), Settings())


# Label counts from the change of a bias.


@tried(max_examples=30)
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


# Four steps at 1, 3/4, 2/4 and 1/4 of the rate, too short to move the probabilities, are counted by their mean rate. The head's
# last layer has three times the rate.
FALLS = {"training__lr_schedule": "linear", "federation__rounds": 1, "training__steps": 4, "training__lr": 0.002}
RATES = [{"training__lr": 0.1}, {**FALLS, "training__head_factor": 3.0}]


@pytest.mark.parametrize("more", chosen(RATES, RATES[1:]), ids=["one step", "falling"])
def test_known_batches_are_counted_better_than_by_the_population(more: dict[str, Any]) -> None:
    """Clients of eight examples and skewed labels."""
    skewed = case(clients=6, each=8, data__partition="dirichlet", data__alpha=0.3, **more)
    found = label_counts.run(skewed, Settings()).measured
    assert found["clients"] == 6
    assert found["l1_error"] < 0.1
    assert found["baseline_l1"] > 4 * found["l1_error"]


def test_it_says_where_it_does_not_apply(plain: Case) -> None:
    """Where steps are no plain gradients, and where the head's last layer is not sent."""
    for name, value in (("optimizer", "adamw"), ("momentum", 0.9), ("max_grad_norm", 0.01), ("proximal", 40.0)):
        with refused(Inapplicable):
            label_counts.run(with_setting(plain, name, value), Settings())
    kept = [replace(one, contribution=one.contribution.without(["classifier.bias"])) for one in plain.seen.updates]
    with refused(Inapplicable):
        label_counts.run(replace(plain, seen=replace(plain.seen, updates=kept)), Settings())


# The noise that a server knows to be in updates and sums, compared with the noise of runs and of encoded sums.


STEPS: dict[str, Any] = {
    "privacy.unit": "example",
    "privacy.noise_multiplier": 30.0,  # so that the gradients are small beside it
    "privacy.clip_norm": 0.1,
    "privacy.delta": 1e-3,
    "evaluation.dummies": 0,
    "federation.rounds": 1,
    "method.rank": 16,
    "training.steps": None,
    "training.optimizer": "sgd",
    "training.lr": 0.01,
}
SIZE = 20_000


def spread(tensors: Tensors) -> float:
    """The standard deviation of the adapters' numbers; the head, which has another rate, is left out."""
    return float(torch.cat([tensors.tensor(name).flatten() for name in tensors if "classifier" not in name]).std())


@pytest.mark.parametrize(
    ("each", "training"),
    [
        (3, {"batch_size": 8}),  # the expected batch is 3, and not 8
        (4, {"batch_size": 2, "epochs": 3, "momentum": 0.8, "lr_schedule": "linear"}),
    ],
)
def test_the_noise_of_private_steps_is_that_of_a_runs_updates(each: int, training: dict[str, Any]) -> None:
    """Of two clients with `each` examples. That of AdamW's steps is not counted."""
    own = STEPS | {f"training.{name}": value for name, value in training.items()}
    train = [canaried.examples(client, each) for client in (1, 2)]
    parts = {"model": canaried.wide(), "train": train, "test": canaried.examples(9, 20), "entropy": SeededEntropy(0)}
    ran = seen(Federation(toys.config(own), **parts))
    for one in ran.seen.updates:
        assert spread(one.contribution) == pytest.approx(update_noise(ran, each, 0), rel=0.05)
    (total,) = ran.seen.sums
    assert spread(total.total) == pytest.approx(sum_noise(ran, total), rel=0.05)
    adamw = with_setting(ran, "optimizer", "adamw")
    assert update_noise(adamw, each, 0) == sum_noise(adamw, total) == 0.0


CLIENTS: dict[str, Any] = {
    "privacy__unit": "client",
    "privacy__noise_multiplier": 1.0,
    "privacy__clip_norm": 0.1,
    "evaluation__dummies": 0,
}


def masked(**settings: Any) -> Case:
    """The view of a server behind masks before the first round."""
    usual = {
        "data.examples": 80,
        "data.test_examples": 40,
        "federation.clients": 20,
        "federation.cohort": 10,
        "secure_aggregation.enabled": True,
    }
    chosen = usual | {name.replace("__", "."): value for name, value in settings.items()}
    config = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in chosen.items()})  # type: ignore[misc]
    return Case(Federation(config).assembly, Seen("secure_server", Tensors()), canaried.never)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"federation__sampling": "poisson"},  # a grid for 20 places
        {"federation__weighting": "examples"},
        CLIENTS,
        CLIENTS | {"privacy__noise": "distributed"},
    ],
)
def test_the_noise_of_a_masked_sum_is_that_of_encoded_contributions(settings: dict[str, Any]) -> None:
    """The sum of ten contributions, encoded and decoded as behind masks, is off by as much as the attack counts."""
    of = masked(**settings)
    protection, terms = of.assembly.protection, of.assembly.masks.sums.terms  # type: ignore[union-attr]
    encoding = terms.encoding(SIZE, protection.clip_norm)
    rng = np.random.default_rng(0)
    longest = min(1.0, protection.clip_norm)
    values = rng.normal(size=(10, SIZE)) * 0.9 * longest / math.sqrt(SIZE)
    words = [
        encoding.encode(Contribution(one, terms.most_weight, math.nan), SeededEntropy(0).stream("share", i))
        for i, one in enumerate(values)
    ]
    off = encoding.decode(sum(words[1:], words[0])).values - terms.most_weight * values.sum(0)
    one = Summed(0, "change", Tensors({"w": torch.zeros(SIZE)}), 10.0, 10)
    assert float(off.std()) == pytest.approx(math.hypot(sum_noise(of, one), grid_noise(of, one)), rel=0.08)
