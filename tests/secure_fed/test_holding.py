"""Which units train and which are held out, by fair coins for whole units; and the membership figure that comes of it.

Every private run has a figure, or says why not and what would give one; figures of rows are for the owner of the data alone.
"""

from __future__ import annotations

import copy
import itertools
import json
import stat
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from secure_fed.commands.comparison.rows import row_of
from secure_fed.commands.comparison.tables import notes
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.export import trained
from secure_fed.federation import Federation
from secure_fed.learning.audit_pool import pool as holding
from secure_fed.learning.audit_pool.pool import FEWEST, AuditPool, pool
from secure_fed.learning.data.audit_unit import Unit
from secure_fed.learning.data.fingerprint import content
from secure_fed.learning.evaluation import confidence_of_classes, confidence_of_likelihood
from secure_fed.report.page import write_report
from secure_fed.report.record import owned as owned_record
from secure_fed.report.terminal import rows
from secure_fed.runs.membership import EXAMPLES, looked_at, mean_of_units, of_data
from secure_fed.runs.result import SCHEMA
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.in_turn import BANDED, IN_TURN
from tests.secure_fed.test_published import ONE, check, config, write

SIZES = (60, 80, 100)
CLIENT = {"privacy.unit": "client", "privacy.epsilon": 8.0, "privacy.delta": 1e-4, "federation.cohort": 10}
WIDE = {"evaluation.audit_fraction": 0.5}
HIDDEN = {"privacy.noise": "distributed", "privacy.hidden_cohort": True}


def numbered(sizes: tuple[int, ...] = SIZES) -> list[list[dict[str, Any]]]:
    """Clients whose examples all differ."""
    return [[toys.examples(1000 * client + i, 1)[0] for i in range(size)] for client, size in enumerate(sizes)]


def held(settings: dict[str, Any] | None = None, train: Any = None) -> AuditPool:
    return toys.federation(settings, train=train or numbered()).assembly.audit_pool


def lots(found: AuditPool) -> dict[bytes, bool]:
    """Whether each unit is a member, by the content of its first example."""
    return {content(unit.examples[0]): bool(is_in) for unit, is_in in zip(found.units, found.members, strict=True)}


def contents(items: Iterable[Any]) -> list[bytes]:
    return [content(item) for item in items]


def test_members_train_and_the_others_are_gone() -> None:
    whole = numbered()
    federation = toys.federation(WIDE, train=whole)
    found = federation.assembly.audit_pool
    assert found.kind == "example"
    trained = [contents(client.examples) for client in federation.assembly.clients]
    for kept, own in zip(trained, map(contents, whole), strict=True):
        assert kept == [one for one in own if lots(found).get(one, True)], "those outside the pool, too, and in order"
    assert [contents(own) for own in found.split(found.members).train] == trained
    everybody = found.split(np.ones(len(found.units), dtype=bool))
    assert [len(own) for own in everybody.train] == list(SIZES)


def test_a_unit_more_changes_nobody_elses_lot() -> None:
    whole = numbered()
    with_it, without = lots(held(WIDE, whole)), lots(held(WIDE, [whole[0][:20] + whole[0][21:], *whole[1:]]))
    gone = content(whole[0][20])
    assert {one: is_in for one, is_in in with_it.items() if one != gone} == without


def test_copies_share_their_lot_and_are_not_asked_about() -> None:
    whole = numbered()
    copied = [[*whole[0], *whole[1][:40]], whole[1], whole[2]]
    federation = toys.federation(WIDE, train=copied)
    found, twice = federation.assembly.audit_pool, set(contents(whole[1][:40]))
    assert not twice & lots(found).keys()
    trained = contents(item for client in federation.assembly.clients for item in client.examples)
    counts = [trained.count(one) for one in twice]
    assert set(counts) == {0, 2}
    assert len(found.copies) == 2 * counts.count(0)
    assert f"{280 - len(trained)} of 280 examples, chosen at random, are not trained" in " ".join(federation.notes)
    for one, member in lots(held(WIDE, whole)).items():
        assert (one in trained) is member  # an added copy changes no other coin


def test_coins_are_fair_and_differ_between_seeds() -> None:
    counts, shares = [], []
    for seed in range(8):
        found = held(WIDE | {"federation.seed": seed})
        counts.append(len(found.units))
        shares.append(float(found.members.mean()))
    assert len(set(shares)) > 3
    total = sum(counts)
    right = sum(count * share for count, share in zip(counts, shares, strict=True))
    assert abs(right - total / 2) < 4 * np.sqrt(total) / 2
    assert abs(total - 8 * 120) < 4 * np.sqrt(8 * 240) / 2  # half of 240 examples are in the pool


def test_with_privacy_for_clients_whole_clients_are_held_out() -> None:
    train = numbered((4,) * 60)
    federation = toys.federation(WIDE | CLIENT | {"federation.rounds": 1}, train=train)
    found = federation.assembly.audit_pool
    out = {unit.name for unit, member in zip(found.units, found.members, strict=True) if not member}
    names = [client.name for client in federation.assembly.clients]
    assert out
    assert not out & set(names)
    assert len(names) == 60 - len(out)
    assert names == federation.assembly.server.names == federation.assembly.problem.facts["clients"]
    assert names == found.split(found.members).names
    sampler = federation.assembly.sampler
    assert (sampler.rate, sampler.expected) == (10 / 60, 10.0), "of all 60 clients, also those held out"
    for unit in found.units:
        assert contents(unit.examples) == contents(train[int(unit.name[-2:])])
    result = federation.run()
    figure = of_data(federation.assembly, result.state)
    assert figure is not None
    assert (found.kind, figure["unit"], figure["non_members"]) == ("client", "client", len(out))
    assert any("membership" in words for words in result.summary["privacy"]["not_covered"])


@pytest.mark.parametrize(("settings", "cohort"), chosen(itertools.product([{}, HIDDEN], [38, 40]), [({}, 38)]))
def test_masks_are_of_those_who_are_there(settings: dict[str, Any], cohort: int) -> None:
    """The cohort is larger than the number of clients that train: no round waits for a held-out client."""
    masks = {"secure_aggregation.enabled": True, "secure_aggregation.dropout": 0.2, "secure_aggregation.corrupt": 0.2}
    chosen = {**WIDE, **private_toys.NOISE, **masks, **settings, "federation.cohort": cohort, "federation.rounds": 1}
    built = private_toys.federation(chosen, 5, train=numbered((2,) * 40))
    assert built.assembly.masks is not None
    assert built.assembly.masks.invited == len(built.assembly.clients) < cohort
    result = built.run()
    assert result.summary["sampling_rate"] == pytest.approx(cohort / 40)
    assert result.summary["cohort"] == cohort


def test_if_the_coins_hold_everybody_out_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"evaluation.audit_fraction": 1.0, "evaluation.audit_unit": "client", "federation.seed": 1194}
    train = numbered((1,) * 10)
    parts = toys.federation({"evaluation.audit_fraction": 0.0}, train=train).assembly.problem
    found = replace(pool(toys.config(settings), parts), members=np.zeros(10, dtype=bool))
    monkeypatch.setattr(holding, "pool", lambda config, parts: found)
    with refused(ConfigError, "evaluation.audit_fraction"):
        toys.federation(settings, train=train)


def test_groups_stay_together() -> None:
    protected = {"privacy.unit": "person", "privacy.epsilon": 8.0, "privacy.person_column": "patient"}
    federation = toys.federation(train=numbered((40, 40)))
    persons = [[f"patient {i // 4}" for i in range(40)]] * 2
    parts = replace(federation.assembly.problem, persons=persons, train=federation.assembly.audit_pool.train)
    found = pool(toys.config(WIDE | protected), parts)
    assert found.kind == "person"
    assert {len(unit.examples) for unit in found.units} == {4}
    dealt = found.split(found.members)
    assert dealt.persons is not None
    for own, whose in zip(dealt.train, dealt.persons, strict=True):
        assert len(own) == len(whose)
        assert all(whose.count(person) == 4 for person in whose)


def test_too_few_units_all_train_and_the_reason_is_said() -> None:
    federation = toys.federation(sizes=(30, 30, 30))
    assert not federation.assembly.audit_pool.units
    assert f"fewer than {FEWEST}" in federation.assembly.audit_pool.why
    assert sum(len(client.examples) for client in federation.assembly.clients) == 90
    figure = federation.run().summary["membership"]
    assert figure["auc"] is figure["auc_interval"] is figure["tpr_at_fpr"] is None
    assert "too few" in figure["why"]
    assert "audit_fraction is 0" in held({"evaluation.audit_fraction": 0.0}).why


def test_a_pool_is_never_larger_than_an_audit_can_read() -> None:
    train = [[{"x": torch.tensor([float(i), 0, 0, 0, 0, 0]), "labels": 0} for i in range(4000)]]
    found = held({"evaluation.audit_fraction": 1.0}, train)
    assert 1500 < len(found.units) <= 2000


def test_examples_without_a_content_are_said_to_have_none() -> None:
    class Opaque:
        pass

    train = [[{"x": torch.zeros(6), "labels": 0, "odd": Opaque()} for _ in range(200)]]
    found = held(None, train)
    assert not found.units
    assert "Opaque" in found.why


@dataclass(frozen=True)
class Said:
    text: str
    spans: tuple[int, ...] = ()


@every(
    ("one", "other"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": np.array([1, 2])}, {"a": np.array([1.0, 2.0])}),
        ({"a": torch.tensor([1, 2])}, {"a": torch.tensor([[1, 2]])}),
        ((1, "23"), (12, "3")),
        (["a", ["b"]], [["a"], "b"]),
        (True, 1),
        (None, "None"),
        (Said("a", (1, 2)), Said("a", (1, 3))),  # as what tasks keep beside a text
    ],
)
def test_contents_differ_where_examples_do(one: Any, other: Any) -> None:
    assert content(one) != content(other)
    assert content(one) == content(copy.deepcopy(one))
    assert content({"a": 1, "b": torch.ones(2)}) == content({"b": np.ones(2, dtype=np.float32), "a": 1})


def test_a_resumed_run_has_the_same_members_and_keeps_them_for_its_owner(tmp_path: Path) -> None:
    settings = WIDE | {"federation.rounds": 2}
    federation = toys.federation(settings, train=numbered())
    straight = federation.run(tmp_path / "a")
    file = tmp_path / "a" / "private" / "membership.json"
    kept = [one["member"] for one in json.loads(file.read_text())["units"]]
    assert kept == federation.assembly.audit_pool.members.tolist()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    toys.federation(WIDE | {"federation.rounds": 1}, train=numbered()).run(tmp_path / "b")
    resumed = toys.federation(settings, train=numbered()).run(tmp_path / "b", resume=True)
    assert resumed.summary["membership"] == straight.summary["membership"]
    assert toys.same(straight.state.tensors, resumed.state.tensors)


def test_canaries_need_somewhere_to_be() -> None:
    with refused(ConfigError, "evaluation.canaries"):
        toys.federation({"evaluation.canaries": "mislabelled"}, sizes=(5, 5))
    with refused(ConfigError, "evaluation.canaries"):
        toys.config({"evaluation.canaries": "mislabelled", "evaluation.audit_fraction": 0.0})


CLASSES = 12  # a label that was not learned is seldom guessed
OVERFIT = {"method.modules_to_save": ["first", "classifier"], "method.target_modules": "query", "federation.rounds": 3}
OVERFIT |= {
    "training.lr": 0.01,
    "evaluation.every": 3,
    "training.steps": 40,
    "training.batch_size": 64,
    "evaluation.audit_fraction": 1.0,
}


def test_what_a_model_knows_by_heart_is_found_among_units_and_rows() -> None:
    data = [[{**item, "labels": i % CLASSES} for i, item in enumerate(own)] for own in numbered((40, 40))]
    others = [{**item, "labels": i % CLASSES} for i, item in enumerate(toys.examples(1234, 40))]
    said = toys.federation(OVERFIT, train=data, model=Wide(), non_members=others).run().summary
    assert said["membership"]["members"] + said["membership"]["non_members"] == 80
    assert said["membership"]["auc"] > 0.9
    assert said["membership"]["auc_interval"][0] > 0.8
    assert said["membership_of_rows"]["auc_interval"][0] > 0.6


class Wide(torch.nn.Module):
    """A model wide enough to memorise random labels."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.first = torch.nn.Linear(6, 256)
            self.query = torch.nn.Linear(256, 64)
            self.classifier = torch.nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.classifier(self.query(self.first(3 * x).relu()).relu())
        return scores


def test_a_model_that_did_not_train_is_at_chance() -> None:
    still = {"evaluation.audit_fraction": 1.0, "training.lr": 1e-12}
    result = toys.federation(still, train=numbered((150, 150, 150))).run()
    low, high = result.summary["membership"]["auc_interval"]
    assert low < 0.5 < high


def test_a_unit_counts_by_the_mean_of_a_few_of_its_examples() -> None:
    units = [Unit("a", "a", list(range(100))), Unit("b", "b", [7]), Unit("c", "c", [])]
    examples, owner = looked_at(units)
    assert len(examples) == EXAMPLES + 1
    means = mean_of_units(np.array([*range(EXAMPLES), 7.0]), owner, 3)
    assert means[0] == pytest.approx(np.mean(range(EXAMPLES)))
    assert means[1] == 7
    assert np.isfinite(means[2])


def test_the_logit_of_a_probability_is_exact_where_float32_has_ended() -> None:
    scores = torch.tensor([[40.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-3.0, 5.0, 0.5]])
    labels = torch.tensor([0, 1, 2])
    p = scores.double().softmax(1).gather(1, labels[:, None]).squeeze(1)
    found = confidence_of_classes(scores, labels)
    assert found.dtype == torch.float64
    assert found[0] == pytest.approx(40 - np.log(1 + np.e))
    assert torch.allclose(found[1:], torch.log(p / (1 - p))[1:])
    assert torch.allclose(confidence_of_likelihood(torch.log(p[1:])), torch.log(p / (1 - p))[1:])
    assert torch.isfinite(confidence_of_likelihood(torch.tensor([0.0, -1e-9, -800.0]))).all()


MASKED = {"secure_aggregation.enabled": True}
CLIENT_LEVEL = {**private_toys.CLIENT, "privacy.noise_multiplier": 1.0}
# Everywhere that noise can be, masked or not; in each, dummies cost these few numbers too much, or are turned off.
WITHOUT: dict[str, dict[str, Any]] = {
    "central": {**CLIENT_LEVEL, "evaluation.dummies": 0},
    "central and masked": {**CLIENT_LEVEL, **MASKED, "evaluation.dummies": 0},
    "local": {**CLIENT_LEVEL, "privacy.noise": "local"},
    "distributed": {**CLIENT_LEVEL, **MASKED, "privacy.noise": "distributed"},
    "hidden": {**CLIENT_LEVEL, **MASKED, "privacy.noise": "distributed", "privacy.hidden_cohort": True},
    "in turn": {**IN_TURN, **BANDED, "evaluation.dummies": 0},
    "example": {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0},
}
OTHERS = toys.examples(1234, 15)


@pytest.mark.parametrize("place", chosen(WITHOUT, ["distributed"]))
def test_a_private_run_without_dummies_tells_what_would_give_a_figure_and_gives_its_owner_one(place: str) -> None:
    settings = {**WITHOUT[place], "federation.rounds": 1}
    alone = toys.federation(settings, sizes=(4,) * 8).run()
    why = alone.summary["membership"]["why"]
    assert alone.summary["membership"]["auc"] is None
    assert why.endswith("given as non_members, would give the owner of the data a figure")
    assert "membership_of_rows" not in alone.withheld

    result = toys.federation(settings, sizes=(4,) * 8, non_members=OTHERS).run()
    found = result.withheld["membership_of_rows"]
    assert (found["members"], found["non_members"], found["non_members_from"]) == (32, 15, "non_members")
    assert 0 <= found["auc"] <= 1
    assert "membership_of_rows" not in result.summary, "it is computed from members' losses, without noise"
    assert str(found["auc"]) not in json.dumps([result.summary, result.public_records])
    assert "private/" in result.summary["membership"]["why"]
    shown = dict(rows(result.summary))
    assert shown["membership"].startswith("no figure: ")
    owned = dict(rows(result.whole))
    assert "for" in {name.strip() for name in owned}
    assert owned["  may mislead"] == found["misleads"]


def test_named_rows_are_compared_in_a_run_with_dummies_too_and_without_privacy(tmp_path: Path) -> None:
    usual = {**CLIENT_LEVEL, "evaluation.dummies": 12, "federation.rounds": 1}
    both = toys.federation(usual, sizes=(4,) * 8, non_members=OTHERS).run()
    assert both.summary["membership"]["auc"] is not None
    assert both.withheld["membership_of_rows"]["auc"] is not None
    open_ = toys.federation({"federation.rounds": 1}, non_members=OTHERS).run(tmp_path)
    assert open_.withheld == {}, "nothing is withheld of a run without privacy"
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["schema"], found["membership_of_rows"]["of"]) == (SCHEMA, "rows")
    assert found["membership_of_rows"]["auc"] is not None
    check(found)


@pytest.mark.usefixtures("never_drawn")
def test_test_rows_held_out_of_the_data_stand_for_non_members(small_model: Path, tmp_path: Path) -> None:
    """In figures.json and in the owner's page; the rest of the run has the reason and the place."""
    write(tmp_path, ONE)
    settings = {**CLIENT_LEVEL, "data.test": "", "data.test_fraction": 0.34, "evaluation.dummies": 0}
    folder = tmp_path / "run"
    Federation(config(settings, small_model, tmp_path)).run(folder)
    public = json.loads((folder / "result.json").read_text())
    own = json.loads((folder / "private" / "figures.json").read_text())["membership_of_rows"]
    assert own["non_members_from"] == "test"
    assert "held out of the same data client by client" in own["misleads"]
    assert "membership_of_rows" not in public
    assert "figure of single rows in private/" in (why := public["membership"]["why"])
    check(public)
    write_report(folder)
    shown, owned = ((folder / place / "report.html").read_text() for place in (".", "private"))
    assert "Rows that trained, and rows that did not" in owned
    assert "Rows that trained, and rows that did not" not in shown
    assert "no figure (why: below)" in shown
    assert f"no figure: {why}" in trained.load_run(folder).card.text("peft")
    row = row_of("mine", {0: owned_record(folder)}, None)
    assert f"mine: no membership figure: {why}." in notes([row])


def test_rows_that_are_no_non_members_are_refused(small_model: Path, tmp_path: Path) -> None:
    """Rows that train, and files that have no such rows or no effect."""
    with refused(DataError, "evaluation.non_members"):
        toys.federation(non_members=[*OTHERS, toys.examples(1, 5)[2]])
    with refused(ConfigError, "evaluation.non_members"):
        RunConfig.from_dict({"evaluation": {"non_members": "others.jsonl"}})  # beside the built-in notes
    with refused(ConfigError, "evaluation.non_members"):
        toys.federation({"evaluation.non_members": "others.jsonl", "data.train": ""})
    write(tmp_path, ONE)
    trains = [{"text": "some other words", "label": "calm"}, {"text": "  Word1 CALM word2", "label": "wild"}]
    for setting, others in (("evaluation.non_members", trains), ("data.text", [{"txt": "no such column"}])):
        (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in others))
        with refused(DataError, setting):
            named = {"evaluation.non_members": str(tmp_path / "mine.jsonl")}
            Federation(config(CLIENT_LEVEL, small_model, tmp_path, **named))
