"""Whole audits: they find a real leak, report nothing without one, and flag a broken guarantee."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from attacks.adversary.case import VANTAGES, Case, Settings, Target, opened, seen, sums_of
from attacks.adversary.shadows import SharedReferences
from attacks.audit import accounted, audited
from attacks.catalogue import ATTACKS
from privacy.mechanisms import Gaussian
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.runs import recording
from tests.attacks import canaried, overfitted
from tests.secure_fed import toys

NO_SHADOWS = Settings(references=0)


def target(run_dir: Path, settings: Mapping[str, Any], train: Sequence[Sequence[Any]], **own: Any) -> Target:
    usual = {"model": canaried.wide(), "test": overfitted.examples(999, 100)}
    built = Federation(toys.config(settings), train=train, **{**usual, **own})
    result = built.run(run_dir)
    return Target(built.assembly, result.state, recording.read(run_dir), result.summary, run_dir)


CLASSES = 12  # so that a label that was not learned is seldom guessed


class Wider(canaried.Wide):
    def __init__(self) -> None:
        super().__init__()
        self.config.num_labels = CLASSES
        self.classifier = nn.Linear(64, CLASSES)


def random_labels(seed: int, count: int) -> list[toys.Item]:
    labels = np.random.default_rng(seed).integers(CLASSES, size=count)
    return [{**item, "labels": int(label)} for item, label in zip(canaried.examples(seed, count), labels, strict=True)]


@pytest.fixture(scope="module")
def by_heart(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A run that memorises random labels."""
    own = {"method.modules_to_save": ["query", "classifier"], "method.target_modules": "value"}
    steps = {"training.optimizer": "adamw", "training.lr": 0.02, "training.steps": 24, "federation.rounds": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Wider()
    train = [random_labels(client + 1, 30) for client in range(4)]
    made = {"model": model, "test": random_labels(999, 100)}
    return target(tmp_path_factory.mktemp("runs") / "by_heart", {**overfitted.USUAL, **own, **steps}, train, **made)


@pytest.fixture(scope="module")
def of_canaries(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Forty clients, every one a canary that is a member or not, with noise on their sums."""
    own = {"federation.cohort": 40, "privacy.noise_multiplier": 1.0, "evaluation.record": "updates"}
    settings = {**canaried.CLIENTS, **own, "method.rank": 2, "federation.rounds": 2}
    train = [canaried.examples(client + 1, 2) for client in range(40)]
    return target(tmp_path_factory.mktemp("runs") / "of_canaries", settings, train)


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """Three clients whose examples are the units."""
    train = [overfitted.examples(client + 1, 12) for client in range(3)]
    settings = {**overfitted.USUAL, "federation.rounds": 2, "training.steps": 2}
    return target(tmp_path_factory.mktemp("runs") / "ordinary", settings, train)


def only_models(ran: Target) -> Target:
    """The run as if only the model of every round had been recorded."""
    assert ran.recorded is not None
    return replace(ran, recorded=replace(ran.recorded, updates=[], sums=[]))


def with_coins(ran: Target, members: Any) -> Target:
    """The run as if these had been its coins."""
    pool = replace(ran.assembly.audit_pool, members=members)
    return replace(ran, assembly=replace(ran.assembly, pools={**ran.assembly.pools, pool.of: pool}))


def cell(audit: Mapping[str, Any], attack: str, vantage: str) -> Mapping[str, Any]:
    found = [one for one in audit["cells"] if (one["attack"], one["vantage"]) == (attack, vantage)]
    assert len(found) == 1
    return dict(found[0])


@pytest.fixture(scope="module")
def by_all(by_heart: Target) -> dict[str, Any]:
    """The run's audit by every attack without references, shared by tests that only read it."""
    return audited(by_heart, [name for name, one in ATTACKS.items() if not one.shadows], NO_SHADOWS)


def test_what_was_learned_by_heart_is_a_leak(by_all: dict[str, Any]) -> None:
    assert cell(by_all, "loss", "outsider")["auc"] > 0.9
    assert by_all["verdict"]["level"] == "leak"
    assert by_all["baseline"]["auc"] is None or by_all["baseline"]["at_chance"]
    assert max(one["epsilon_lower"] or 0 for one in by_all["cells"] if one["applicable"]) > 0.5
    assert by_all["epsilon_accounted"] is None


def test_a_model_that_never_trained_tells_nothing(tmp_path: Path) -> None:
    train = [overfitted.examples(client + 1, 50) for client in range(4)]
    still = {**overfitted.USUAL, "training.lr": 1e-12, "federation.rounds": 2}
    audit = audited(target(tmp_path / "run", still, train), ["loss", "round_losses"], NO_SHADOWS)
    low, high = cell(audit, "loss", "outsider")["auc_interval"]
    assert low < 0.5 < high
    assert audit["verdict"]["level"] == "none_found"
    assert "not proof of privacy" in audit["verdict"]["text"]


def test_an_attack_is_seen_only_by_those_who_see_enough(by_all: dict[str, Any]) -> None:
    audit = by_all
    order = list(VANTAGES)
    for one in audit["cells"]:
        weakest = ATTACKS[one["attack"]].vantage
        if order.index(one["vantage"]) < order.index(weakest):
            assert not one["applicable"]
            assert one["why"]
        if not one["applicable"]:
            assert one["auc"] is one["auc_interval"] is one["epsilon_lower"] is None
    assert len(audit["cells"]) == len(order) * sum(not one.shadows for one in ATTACKS.values())


def test_bounds_hold_for_all_attacks_that_gave_scores_together(by_heart: Target, by_all: dict[str, Any]) -> None:
    """Attacks that do not apply use no significance, because this is decided without scores."""
    alone = cell(audited(by_heart, ["loss"], NO_SHADOWS), "loss", "outsider")
    among = cell(by_all, "loss", "outsider")
    assert among["auc_interval"] == alone["auc_interval"]  # of one number by itself: there is no other on the page
    assert among["epsilon_lower"] <= alone["epsilon_lower"]
    assert among["epsilon_showable"] < alone["epsilon_showable"]
    left_out = ["loss", "lira", "rmia", "canary_cosine", "gradient_inversion"]
    beside = audited(by_heart, left_out, NO_SHADOWS)
    assert "--references" in cell(beside, "lira", "server")["why"]
    for name in ("epsilon_lower", "epsilon_showable"):
        assert cell(beside, "loss", "outsider")[name] == alone[name]


def test_those_accused_first_are_named_and_texts_are_withheld(by_heart: Target, by_all: dict[str, Any]) -> None:
    held = by_heart.assembly.audit_pool
    truth = {unit.name: bool(member) for unit, member in zip(held.units, held.members, strict=True)}
    assert all(one["member"] is truth[one["unit"]] for one in by_all["exposed"])
    wrong = [not one["member"] for one in by_all["exposed"]]
    assert sum(wrong) < len(wrong) / 4  # with an area of .9 most of the first are right
    assert by_all["accusations"] == [{"first": n, "false": sum(wrong[:n])} for n in (10, 20, 50)]
    assert all(one["text"] is None for one in by_all["exposed"])
    scores = [one["score"] for one in by_all["exposed"]]
    assert scores == sorted(scores, reverse=True)
    assert [one["rank"] for one in by_all["exposed"]] == list(range(1, 1 + len(scores)))
    assert by_all["clients"][0]["score"] >= by_all["clients"][-1]["score"]
    assert sum(one["held_out"] for one in by_all["clients"]) == (~held.members).sum()


@pytest.mark.parametrize(
    ("place", "vantage", "expected"),
    [
        ("sum", "outsider", 3.0),
        ("sum", "fellow_client", 3.0),
        ("sum", "secure_server", None),  # it adds the noise itself
        ("sum", "server", None),
        ("shares", "outsider", None),  # a neighbour there sends its noise, where the coins take it away
        ("shares", "secure_server", None),
        ("contribution", "server", 7.0),
        ("gradients", "server", 7.0),
        ("gradients", "outsider", 3.0),
    ],
)
def test_an_epsilon_is_set_beside_what_it_covers(place: str, vantage: str, expected: float | None) -> None:
    terms = {"private": True, "adjacency": "one client more or less", "place": place}
    result = {"epsilon": 3.0, "epsilon_participants": 7.0, "privacy": terms}
    assert accounted(result, vantage) == expected
    assert accounted({**result, "privacy": {**terms, "private": False}}, vantage) is None
    assert accounted({**result, "privacy": {**terms, "adjacency": "one client replaced by another"}}, vantage) is None
    assert accounted({**result, "privacy": None}, vantage) is None


def test_a_vantage_sees_what_weaker_ones_see_and_more(by_heart: Target) -> None:
    views = [seen(name, by_heart.final.tensors, by_heart.recorded) for name in VANTAGES]
    assert [bool(view.states) for view in views] == [False, True, True, True]
    assert [bool(view.sums) for view in views] == [False, False, True, True]
    assert [bool(view.updates) for view in views] == [False, False, False, True]
    updates = views[-1].updates
    first = [one.contribution for one in updates if one.round == 0]
    total = next(one for one in sums_of(updates) if one.round == 0)
    assert total.clients == len(first) == 4
    for name in total.total:
        expected = sum(one.tensor(name).double() for one in first)
        np.testing.assert_allclose(total.total.tensor(name), expected, atol=1e-5)
    averaged = seen("fellow_client", by_heart.final.tensors, by_heart.recorded, averaged=True)
    assert sorted(averaged.states) == sorted(views[1].states)[:-1], "a mean of models is no step of a round"
    nothing = seen("server", by_heart.final.tensors, None)
    assert not any((nothing.states, nothing.sums, nothing.updates))


@pytest.fixture(scope="module")
def canaries_by_all(of_canaries: Target) -> dict[str, Any]:
    """The audit of canaries by every attack, shared by tests that only read it."""
    return audited(of_canaries, [], NO_SHADOWS, show_texts=True)


def test_reasons_are_each_adversarys_own(of_canaries: Target) -> None:
    """Of canary clients: who sees models cannot ask what they learned; who sees names need not ask."""
    audit = audited(only_models(of_canaries), ["loss", "canary_cosine", "label_counts"], NO_SHADOWS)
    assert "learn nothing of their examples" in cell(audit, "loss", "outsider")["why"]
    assert "invites clients to a sum by name" in cell(audit, "loss", "secure_server")["why"]
    assert "gets every update with its client's name" in cell(audit, "loss", "server")["why"]
    assert audit["main"] == {"attack": "canary_cosine", "vantage": "fellow_client"}
    assert audit["clients"] == []  # units are clients: the list of units is theirs
    told = cell(audit, "canary_cosine", "fellow_client")
    assert told["null"] == "known"
    assert told["allowed"]["by"] == "mechanism"
    assert 0.5 < told["allowed"]["auc"] < 1


def test_who_takes_part_is_in_plain_sight_of_servers(canaries_by_all: dict[str, Any]) -> None:
    """What an outsider can find out of them is no measure of what a server knows. Only attacks that can ask about directions
    apply.
    """
    audit = canaries_by_all
    assert {one["attack"] for one in audit["cells"] if one["applicable"]} == {
        *("one_run", "canary_cosine", "canary_likelihood")
    }
    assert all(one["text"] is None for one in audit["exposed"])  # no tokenizer, no text
    for name, vantage in itertools.product(("one_run", "canary_cosine"), ("secure_server", "server")):
        assert cell(audit, name, "fellow_client")["applicable"]
        assert not cell(audit, name, vantage)["applicable"]
        assert "knows the membership of whole clients" in cell(audit, name, vantage)["why"]
        assert cell(audit, name, vantage)["auc"] is None


@pytest.mark.parametrize("name", sorted(name for name, one in ATTACKS.items() if one.membership))
def test_no_attack_reads_the_coins(name: str, ordinary: Target, of_canaries: Target) -> None:
    """With other coins as the truth, after the run, every score is the same bit for bit."""
    attack, settings = ATTACKS[name], Settings(references=4, seed=3)
    ran = only_models(of_canaries) if attack.directions else ordinary
    found = []
    for members in (ran.assembly.audit_pool.members, ~ran.assembly.audit_pool.members):
        other = with_coins(ran, members).assembly
        vantage = attack.vantage if attack.directions else (attack.vantage, *attack.again)[-1]
        case = Case(other, seen(vantage, ran.final.tensors, ran.recorded), SharedReferences(other, settings.seed))
        found.append(attack.run(case, settings).scores)
    assert found[0] is not None
    assert found[1] is not None
    np.testing.assert_array_equal(*found)


def test_clients_beside_canaries_are_asked_for_their_labels(tmp_path: Path) -> None:
    """Ordinary clients' updates come from their examples; updates of canaries, which learn no examples, are left out."""
    canaries = {"canaries": "direction", "audit_unit": "client", "audit_fraction": 0.5}
    settings = {
        **overfitted.USUAL,
        "federation.rounds": 1,
        **{f"evaluation.{name}": canaries[name] for name in canaries},
    }
    ran = target(tmp_path / "run", settings, [overfitted.examples(client + 1, 4) for client in range(40)])
    found = cell(audited(ran, ["label_counts"], NO_SHADOWS), "label_counts", "server")
    assert found["applicable"]
    assert ran.recorded is not None
    sent = {update.client for update in ran.recorded.updates}
    ordinary = sent - {unit.client for unit in ran.assembly.audit_pool.units}
    assert found["measured"]["clients"] == len(ordinary) < len(sent)


# At a size that says something: the built-in model, hundreds of units, several runs. docs/audit_measured.md shows one run.


SMALL: dict[str, Any] = {
    **{"data.examples": 800, "data.test_examples": 400, "federation.clients": 8, "federation.cohort": 8},
    **{"evaluation.audit_fraction": 1.0, "evaluation.every": 100},
}
BY_HEART = {
    **SMALL,
    **{"method.name": "fedlora", "method.rank": 16, "federation.rounds": 12, "training.epochs": 4, "training.lr": 5e-3},
}
CLIENTS = {
    **{"data.examples": 2400, "data.test_examples": 200, "method.name": "ffa_lora", "training.lr": 0.02},
    **{"federation.clients": 800, "federation.cohort": 160, "federation.rounds": 8, "federation.sampling": "poisson"},
    **{"evaluation.audit_fraction": 0.5, "evaluation.canaries": "direction", "evaluation.record": "models"},
    "evaluation.every": 100,
}


def audit_of(folder: Path, settings: Mapping[str, Any], names: list[str], references: int = 0) -> dict[str, Any]:
    config = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in settings.items()})  # type: ignore[misc]
    Federation(config).run(folder)
    return audited(opened(folder), names, Settings(references=references))


def printed(audit: Mapping[str, Any], attack: str, vantage: str = "outsider") -> Mapping[str, Any]:
    found = cell(audit, attack, vantage)
    tpr = (found["tpr_at_fpr"] or {}).get("0.01")
    low, high = found["auc_interval"]
    caught = "" if tpr is None else f", TPR {tpr['tpr']:.3f} at {tpr['fpr']:.3f} FPR"
    bound = found["epsilon_lower"]
    print(
        f"\n{attack}, {vantage}: AUC {found['auc']:.3f} ({low:.3f} to {high:.3f}){caught}, epsilon at least {bound}",
        end="",
    )
    return found


@pytest.mark.weekly
def test_learned_by_heart(tmp_path: Path) -> None:
    audit = audit_of(tmp_path / "run", BY_HEART, ["loss", "lira", "lira_offline", "rmia"], references=16)
    found = {name: printed(audit, name) for name in ("loss", "lira", "lira_offline", "rmia")}
    assert found["loss"]["auc_interval"][0] > 0.5
    assert found["lira"]["auc"] > found["loss"]["auc"]
    assert audit["verdict"]["level"] == "leak"
    assert audit["baseline"]["at_chance"]


@pytest.mark.weekly
def test_learned_by_heart_under_privacy(tmp_path: Path) -> None:
    private = {**BY_HEART, "privacy.unit": "example", "privacy.epsilon": 4.0, "privacy.clip_norm": 0.5}
    audit = audit_of(tmp_path / "run", private, ["loss"])
    found = printed(audit, "loss")
    assert found["epsilon_lower"] <= found["epsilon_accounted"] <= 4
    assert audit["verdict"]["level"] != "violation"


@pytest.mark.weekly
def test_wrong_labels_are_remembered(tmp_path: Path) -> None:
    longer = {**BY_HEART, "evaluation.canaries": "mislabelled", "federation.rounds": 20}  # wrong labels take their time
    audit = audit_of(tmp_path / "run", longer, ["one_run"])
    assert printed(audit, "one_run")["auc"] > 0.9
    assert printed(audit, "one_run")["epsilon_lower"] > 1


@pytest.mark.weekly
def test_models_that_never_trained_tell_nothing(tmp_path: Path) -> None:
    covered, leaks = 0, 0
    for seed in range(20):
        still = {**SMALL, "federation.rounds": 1, "training.lr": 1e-12, "federation.seed": seed}
        audit = audit_of(tmp_path / f"run-{seed}", still, ["loss"])
        low, high = printed(audit, "loss")["auc_interval"]
        covered += low <= 0.5 <= high
        leaks += audit["verdict"]["level"] == "leak"
    print(f"\n{covered} of 20 intervals cover a half, {leaks} leaks called", end="")
    assert covered >= 16  # 19 are due; fewer than 16 come in 3 of 1,000 nights
    assert leaks <= 3


@pytest.mark.weekly
def test_coins_drawn_anew_call_a_leak_as_seldom_as_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model that never saw any unit, and 300 draws of coins: at most 5 % of audits may report a leak."""
    still = {**SMALL, "federation.rounds": 1, "training.lr": 1e-12}
    config = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in still.items()})  # type: ignore[misc]
    built = Federation(config)
    result = built.run(tmp_path / "run")
    monkeypatch.setattr("attacks.audit.baseline", lambda units, members, seed: "left out")
    leaks = 0
    for seed in range(300):
        coins = np.random.default_rng(seed).random(len(built.assembly.audit_pool.units)) < 0.5
        target = with_coins(Target(built.assembly, result.state, None, result.summary), coins)
        leaks += audited(target, ["loss"], Settings(references=0))["verdict"]["level"] == "leak"
    print(f"\n{leaks} of 300 deals called a leak", end="")
    assert leaks <= 26  # 15 are due; more than 26 come in 3 of 1,000 nights


@pytest.mark.weekly
@pytest.mark.parametrize("noise", [True, False], ids=["as it is", "its noise forgotten"])
def test_canaries_of_random_direction(tmp_path: Path, noise: bool) -> None:
    private = {**CLIENTS, "privacy.unit": "client", "privacy.epsilon": 1.0, "privacy.clip_norm": 3.1}
    with nullcontext() if noise else patch.object(Gaussian, "noised", canaried._clean):
        audit = audit_of(tmp_path / "run", private, ["canary_cosine"])
    found = printed(audit, "canary_cosine", "fellow_client")
    print(f", accounted {found['epsilon_accounted']:.2f}", end="")
    assert (found["epsilon_lower"] <= found["epsilon_accounted"]) is noise
    assert (audit["verdict"]["level"] == "violation") is not noise
