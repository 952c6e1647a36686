"""Audits prepared before a training elsewhere: coins, seals, and a bound that keeps its level."""

from __future__ import annotations

import json
import math
import shlex
import stat
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from attacks.adversary.null import Bools
from attacks.extraction.exposure import Template, exposures, order, uniform
from attacks.prepared import findings, folder
from attacks.prepared.folder import Manifest, Truth, Wish, prepare, tossed, wrong_labels
from privacy.entropy import SeededEntropy
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import ConfigError, DataError
from secure_fed.learning.data import notes
from secure_fed.learning.data.rows import Vocabulary
from secure_fed.runs.roc import Ranking
from tests.attacks.refusals import Capsys, facts_of, refusals, shown_by
from tests.attacks.small_lm import saved, tokenizer_of, untrained
from tests.attacks.test_any_model import LENGTH, lines_of, trained, written
from tests.golden import refused


def rows(count: int = 160) -> list[dict[str, Any]]:
    made, rng = notes.generate(count, seed=5, split="train"), np.random.default_rng(5)
    return [{"text": text, "label": f"kind {rng.integers(3)}", "id": index} for index, text in enumerate(made.text)]


def wish(source: Path, kind: str = "none", **more: Any) -> Wish:
    task = "causal_lm" if kind == "secrets" else "classification"
    return Wish(source, DataConfig(train="x", task=task), kind, **more)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("data") / "data.jsonl", rows())


def test_members_train_and_the_others_are_gone(data: Path, tmp_path: Path) -> None:
    manifest = prepare(wish(data, count=100), tmp_path / "out", SeededEntropy(0))
    members = folder.truth_of(tmp_path / "out", manifest).members
    candidates, train = lines_of(tmp_path / "out/candidates.jsonl"), lines_of(tmp_path / "out/train.jsonl")
    assert len(candidates) == 100
    assert 30 < members.sum() < 70
    left_out = {row["id"] for row, member in zip(candidates, members, strict=True) if not member}
    assert train == [row for row in rows() if row["id"] not in left_out]


def test_the_truth_is_for_its_owner_alone_and_cannot_be_changed(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    manifest = prepare(wish(data), out, SeededEntropy(0))
    truth = out / "private/truth.json"
    assert stat.S_IMODE(truth.stat().st_mode) == 0o600
    assert stat.S_IMODE(truth.parent.stat().st_mode) == 0o700
    assert folder.read(out) == manifest
    published = (out / "prepared.json").read_text()
    assert folder.digest(truth.read_bytes()) in published
    assert json.loads(truth.read_text())["nonce"] not in published
    flipped = json.loads(truth.read_text())
    flipped["members"] = ("1" if flipped["members"][0] == "0" else "0") + flipped["members"][1:]
    truth.write_text(json.dumps(flipped) + "\n")
    with refused(DataError, hide=r"[0-9a-f]{12}(?=\.\.\.)"):
        folder.truth_of(out, manifest)


def test_a_changed_file_is_noticed_and_a_training_file_may_be_elsewhere(data: Path, tmp_path: Path) -> None:
    """Without the digests of a manifest, changed files would not be noticed."""
    out = tmp_path / "out"
    prepare(wish(data), out)
    (out / "train.jsonl").unlink()
    folder.read(out)
    manifest = json.loads((out / "prepared.json").read_text())
    for damage in (
        {"digests": []},
        {"digests": {}},
        {"task": "songs"},
        {"kind": 7},
        {"commitment": 4},
        {"candidates": "ten"},
        {"text": 5},
    ):
        (out / "prepared.json").write_text(json.dumps(manifest | damage))
        with refused(DataError):
            folder.read(out)
    (out / "prepared.json").write_text(json.dumps(manifest))
    with (out / "candidates.jsonl").open("a") as file:
        file.write(json.dumps(rows()[0]) + "\n")
    with refused(DataError):
        folder.read(out)


def test_the_same_coins_have_another_seal(tmp_path: Path) -> None:
    """Without a nonce, ten coins could be found by trying all of them against the digest."""
    members = np.ones(10, dtype=bool)
    assert len({Truth(members, tossed(10, SeededEntropy(seed)).nonce).sealed() for seed in range(5)}) == 5
    assert len(tossed(10, SeededEntropy(0)).nonce) == 64


def test_coins_are_fair_and_of_the_operating_system(data: Path, tmp_path: Path) -> None:
    heads = int(tossed(40_000, SeededEntropy(3)).members.sum())
    assert stats.binomtest(heads, 40_000).pvalue > 1e-3
    found = [prepare(wish(data), tmp_path / str(run)).commitment for run in range(2)]
    assert found[0] != found[1]


def test_copies_and_near_copies_and_single_words_are_no_candidates(tmp_path: Path) -> None:
    """A copy would train regardless of the coin. A language model has nothing to predict in one token."""
    twice = written(tmp_path / "twice.jsonl", [*rows(20), *rows(10)])
    prepare(wish(twice, count=10), tmp_path / "labelled", SeededEntropy(0))
    assert {row["id"] for row in lines_of(tmp_path / "labelled/candidates.jsonl")} == set(range(10, 20))
    texts = [row["text"] for row in rows(20)]
    some = [*texts, *(f" {one.upper()}" for one in texts[10:]), "so"]
    near = written(tmp_path / "near.jsonl", [{"text": one} for one in some])
    prepare(Wish(near, DataConfig(train="x", task="causal_lm"), count=10), tmp_path / "out", SeededEntropy(0))
    assert {row["text"] for row in lines_of(tmp_path / "out/candidates.jsonl")} == set(texts[:10])


def test_where_nothing_can_be_shown_a_pipeline_learns_it(tmp_path: Path, capsys: Capsys) -> None:
    """Ten candidates are few for a bound, and with this seed none of them is in the training."""
    few, none = written(tmp_path / "data.jsonl", rows(40)), 1272
    settings = DataConfig(train="x", task="causal_lm")
    for name, kind, seed in (("few", "none", 0), ("alike", "none", none), ("unplanted", "secrets", none)):
        manifest = prepare(Wish(few, settings, kind, 10), tmp_path / name, SeededEntropy(seed))
        assert folder.truth_of(tmp_path / name, manifest).members.any() == (seed != none)
    tokenizer = tokenizer_of([row["text"] for row in rows(40)])
    saved(untrained(tokenizer), tokenizer, tmp_path / "model")
    audits = ["audit", "prepared", str(tmp_path / "model")]
    for arguments, status, said in (
        (["few", "--fail-above", "epsilon=5"], 5, "10 candidates cannot show an epsilon above 1.05; prepare more"),
        (["few", "--fail-above", "epsilon=0.1", "--delta", "0.01"], 5, "cannot show an epsilon above 0.00; prepare"),
        (["few", "--fail-above", "epsilon=0.5"], 0, ""),
        (["alike"], 2, "so there is nothing to compare them with: prepare and train again"),
        (["unplanted", "--exposure", "--secrets-tried", "3", "--fail-above", "exposure=1"], 5, "no planted secret was"),
    ):
        assert main([*audits, str(tmp_path / arguments[0]), *arguments[1:]]) == status, arguments
        assert said in capsys.readouterr().err


def test_the_exposure_of_targets_is_that_of_prompts_and_targets(tmp_path: Path, capsys: Capsys) -> None:
    """A target begins with its secret."""
    file = written(tmp_path / "data.jsonl", [{"q": row["text"], "a": "yes"} for row in rows(40)])
    settings, template = DataConfig(train="x", task="causal_lm", text="q", text_b="a"), Template("Q {name}:{secret}", 1)
    manifest = prepare(Wish(file, settings, "secrets", 10, template=template), tmp_path / "out", SeededEntropy(0))
    one = lines_of(tmp_path / "out/candidates.jsonl")[0]
    assert (one["q"][:2], one["q"][-1], len(one["a"])) == ("Q ", ":", 1)
    tokenizer = tokenizer_of([row["text"] for row in rows(40)])
    model = untrained(tokenizer)
    saved(model, tokenizer, tmp_path / "model")
    command = ["audit", "prepared", tmp_path / "model", tmp_path / "out", "--exposure"]
    found = [one["exposure"] for one in facts_of(command, capsys)["secrets"]]
    _, planted = folder.planted_in(tmp_path / "out", manifest)
    assert found == [one.exposure for one in exposures(model, tokenizer, template, planted, prompted=True)]
    assert found != [one.exposure for one in exposures(model, tokenizer, template, planted)]
    with refused(ConfigError):
        prepare(Wish(file, settings, "secrets", 20, template=Template("{secret} {name}")), tmp_path / "other")


def test_wrong_labels_are_wrong_and_their_rows_are_gone(data: Path, tmp_path: Path) -> None:
    manifest = prepare(wish(data, "labels", count=80), tmp_path / "out", SeededEntropy(1))
    own = {row["id"]: row["label"] for row in rows()}
    candidates, train = lines_of(tmp_path / "out/candidates.jsonl"), lines_of(tmp_path / "out/train.jsonl")
    assert all(row["label"] != own[row["id"]] for row in candidates)
    shifts = Counter((int(row["label"][-1]) - int(own[row["id"]][-1])) % 3 for row in candidates)
    assert min(shifts[1], shifts[2]) > 20
    members = folder.truth_of(tmp_path / "out", manifest).members
    planted = {row["id"]: row for row, member in zip(candidates, members, strict=True) if member}
    chosen = {row["id"] for row in candidates}
    assert sorted(row["id"] for row in train) == sorted(planted.keys() | (own.keys() - chosen))
    assert all(row["label"] == planted.get(row["id"], {"label": own[row["id"]]})["label"] for row in train)
    places = [index for index, row in enumerate(train) if row["id"] in chosen]
    assert places[0] < len(train) // 3
    assert places[len(places) // 2] < len(train) * 2 // 3, "the planted ones are anywhere, and not at the end"


@pytest.mark.parametrize("spelled", [("0", "1"), (0, 1), (False, True), ("no", "yes")], ids=str)
def test_a_planted_row_is_spelled_as_any_other(spelled: tuple[Any, Any]) -> None:
    """A CSV file has its labels as texts, and beside a label may stand its name: neither shows which rows are planted."""
    rows = [{"text": f"note {at}", "label": spelled[at % 2], "label_name": f"class {at % 2}"} for at in range(20)]
    values = tuple(
        str(one).lower() if isinstance(one, bool) else int(one) if one in ("0", "1") else one for one in spelled
    )
    classes = Vocabulary(values, tuple(map(str, values)))
    made = wrong_labels(rows, "label", classes, SeededEntropy(0).stream("labels"))
    for row, own in zip(made, rows, strict=True):
        assert row["label"] != own["label"]
        assert type(row["label"]) is type(own["label"])
        assert (row["label"], row["label_name"]) in {(one["label"], one["label_name"]) for one in rows}
    alone = wrong_labels(rows[:1], "label", classes, SeededEntropy(0).stream("labels"))
    assert alone[0]["label"] == spelled[1]
    assert type(alone[0]["label"]) is type(spelled[1])


def test_secrets_are_planted_as_often_as_asked_for(data: Path, tmp_path: Path) -> None:
    manifest = prepare(wish(data, "secrets", count=40, repeat=3), tmp_path / "out", SeededEntropy(1))
    members = folder.truth_of(tmp_path / "out", manifest).members
    template, planted = folder.planted_in(tmp_path / "out", manifest)
    seen = Counter(row["text"] for row in lines_of(tmp_path / "out/train.jsonl"))
    for member, one in zip(members, planted, strict=True):
        assert seen[f"The access code of {one.name} is {one.secret}."] == 3 * member
    candidates = lines_of(tmp_path / "out/candidates.jsonl")
    assert [row["text"] for row in candidates] == [template.written(one) for one in planted]
    assert len({one.name for one in planted}) == 40
    assert all(row["text"] in seen for row in rows()), "all of the data train"


def test_draws_are_uniform() -> None:
    stream = SeededEntropy(0).stream("x")
    assert stats.chisquare(list(Counter(uniform(stream, 7, 7000)).values())).pvalue > 1e-3
    assert sorted(order(stream, 50)) == list(range(50))


# The bound, over many audits of mechanisms whose epsilon is known.

CANDIDATES = 120
Mechanism = Callable[[Bools, np.random.Generator], Any]


def response(epsilon: float) -> Mechanism:
    """Randomised response: each candidate's coin is told right with probability e^epsilon / (1 + e^epsilon)."""

    def told(members: Bools, rng: np.random.Generator) -> Any:
        right = rng.random(len(members)) < 1 / (1 + math.exp(-epsilon))
        return np.where(right, members, ~members) + rng.random(len(members)) * 0.5

    return told


def gaussian(mu: float) -> Mechanism:
    return lambda members, rng: mu * members + rng.normal(size=len(members))


def exceeded(mechanism: Mechanism, epsilon: float, toss: Callable[[int, Any], Truth], monkeypatch: Any) -> int:
    """The number of sixty audits whose bound is above the mechanism's epsilon."""
    monkeypatch.setattr(findings, "rank", lambda *given: Ranking(0.5, (0.4, 0.6), 1, 1, {}))  # no bound rests on it
    manifest = Manifest("classification", "text", "", "label", "none", CANDIDATES)
    rng, above = np.random.default_rng(0), 0
    for run in range(60):
        members = toss(CANDIDATES, SeededEntropy(run)).members
        found = findings.judged(mechanism(members, rng), members, manifest, 0.0).bound
        assert found.epsilon is not None
        above += found.epsilon > epsilon
    return above


def leaning(count: int, entropy: Any) -> Truth:
    """A fault: four candidates in five are members."""
    return Truth(entropy.stream("coins").uniform(count) < 0.8, "")


MOST_OF_60 = int(stats.binom.isf(1e-3, 60, findings.SIGNIFICANCE))


@pytest.mark.parametrize(("mechanism", "epsilon"), [(gaussian(0.0), 0.0), (response(0.5), 0.5)])
def test_the_bound_holds_in_few_audits(mechanism: Mechanism, epsilon: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exceeded(mechanism, epsilon, tossed, monkeypatch) <= MOST_OF_60


def test_coins_that_lean_are_seen_by_the_same_audits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With leaning coins, uninformed guesses are right too often."""
    assert exceeded(gaussian(0.0), 0.0, leaning, monkeypatch) > MOST_OF_60


# From the command line, with a training by plain PEFT.


@pytest.mark.nightly
def test_a_training_that_learned_by_heart_spent_an_epsilon_and_another_did_not(
    data: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("own", "the others")):
        monkeypatch.setattr(folder, "SystemEntropy", lambda seed=seed: SeededEntropy(seed))
        arguments = ["audit", "prepare", str(data), "--out", str(tmp_path / name), "--canaries", "labels"]
        assert main([*arguments, "--count", "80"]) == 0
        printed = capsys.readouterr().out
        assert "which fixes unseen who of 80 candidates trains" in printed
        assert shlex.split(printed.splitlines()[-1])[-4:] == ["MODEL", str(tmp_path / name), "--adapter", "ADAPTER"]
    adapter = trained(tmp_path / "adapter", lines_of(tmp_path / "own/train.jsonl"), 30)
    model = ["audit", "prepared", "builtin/tiny", "--adapter", str(adapter), "--max-length", str(LENGTH)]
    model += ["--labels", "kind 0,kind 1,kind 2"]
    limit = ["--fail-above", "epsilon=1"]
    found = facts_of([*model, tmp_path / "own", *limit], capsys, 4, "above --fail-above epsilon=1")
    assert 1 < found["epsilon_lower"] <= found["epsilon_most"]
    shown = shown_by([*model, str(tmp_path / "the others"), *limit], capsys)
    assert "epsilon is at least 0.00 at delta 1e-05" in shown
    assert "It assumes that" in shown


def test_what_does_not_fit_is_one_sentence(tmp_path: Path, capsys: Capsys) -> None:
    few = written(tmp_path / "data.jsonl", rows(40))
    secrets = ("--task", "causal_lm", "--canaries", "secrets")
    calls = [
        ["prepare", few, "--out", tmp_path / "out", *more]
        for more in (
            ("--count", "41"),
            ("--canaries", "secrets"),
            ("--repeat", "2"),
            ("--digits", "2"),
            (*secrets, "--digits", "0"),
            ("--out", tmp_path),
        )
    ]
    calls += [["prepare", tmp_path / "no.jsonl", "--out", tmp_path / "out"]]
    calls += [
        ["prepared", "builtin/tiny", tmp_path, *more] for more in ((), ("--delta", "1"), ("--fail-above", "auc=1"))
    ]
    refusals("prepared", (["audit", *call] for call in calls), capsys)
    assert not (tmp_path / "out").exists()


def test_a_template_has_its_secret_once_and_without_a_name_plants_no_more_than_a_tenth_of_all() -> None:
    for text, digits in (("no place", 6), ("{secret} {secret}", 6), ("{secret}", 16)):
        with refused(ConfigError):
            Template(text, digits)
    stream = SeededEntropy(0).stream("x")
    assert len(Template("{secret}", 2).drawn(10, stream)) == 10
    with refused(ConfigError):
        Template("{secret}", 2).drawn(11, stream)
