"""Audits of models trained without secure-fed: plain Transformers and PEFT train them here."""

from __future__ import annotations

import csv
import json
import re
import shutil
import zlib
from collections.abc import Iterable, Sequence
from html import unescape
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import hypergeom, norm, rankdata

from attacks.any_model import outputs, signals
from attacks.any_model.outputs import require_head
from attacks.any_model.report import ALPHA, _found, above_by_chance, judged
from attacks.any_model.subject import Tokens
from attacks.evidence.baseline import Baseline
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import ModelError, UsageError
from secure_fed.learning import tasks
from secure_fed.learning.data import notes
from secure_fed.learning.data.rows import Vocabulary
from secure_fed.learning.models.locate import locate
from secure_fed.runs import roc
from tests.attacks.refusals import Capsys, facts_of, refusals
from tests.cells import chosen
from tests.golden import refused

TEXTS, LENGTH = 40, 24
KINDS = ("kind 0", "kind 1", "kind 2")  # the classes, in the order of the models' outputs, which have no names


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Notes with random labels, which can only be memorised; seeds differ by chance."""
    made, rng = notes.generate(400, seed=0, split="train"), np.random.default_rng(seed)
    order = np.random.default_rng(0).permutation(400)[seed * TEXTS :][:count]
    return [{"text": made.text[index], "label": f"kind {rng.integers(3)}"} for index in order]


def written(path: Path, some: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def trained(place: Path, some: Sequence[dict[str, Any]], steps: int) -> Path:
    """An adapter by plain PEFT, after full batches of these texts."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(locate("builtin/tiny"))
    torch.manual_seed(0)
    model: Any = AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=3)
    config = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules=["query", "value"])
    model = get_peft_model(model, config)
    cut = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    batch = tokenizer([row["text"] for row in some], **cut)
    labels = torch.tensor([int(row["label"][-1]) for row in some])
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch, labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Members, others, and an adapter trained by plain PEFT on the members."""
    tmp = tmp_path_factory.mktemp("others")
    for seed, name in enumerate(("members", "others")):
        written(tmp / f"{name}.jsonl", rows(TEXTS, seed))
    trained(tmp / "adapter-members", rows(TEXTS, 0), 24)
    return tmp


def untrained(folder: Path, seed: int) -> Path:
    """A model that never saw any text, with its own head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = folder / f"untrained-{seed}"
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=3).save_pretrained(place)
    AutoTokenizer.from_pretrained(locate("builtin/tiny")).save_pretrained(place)
    return place


def audit(folder: Path, adapter: str, *more: Any) -> list[str]:
    """The later of two equal options counts."""
    texts = ["--members", folder / "members.jsonl", "--non-members", folder / "others.jsonl"]
    model = ["audit", "model", "builtin/tiny", "--adapter", folder / f"adapter-{adapter}"]
    return [*map(str, (*model, *texts, "--max-length", LENGTH, "--labels", ",".join(KINDS), *more))]


def test_an_adapter_that_learned_the_members_is_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys
) -> None:
    """A pipeline learns it by the exit status. A signal of the user's own stands beside the others. The page says the verdict
    first, and holds no text.
    """
    scores, own, out = tmp_path / "scores.csv", tmp_path / "sharper.py", tmp_path / "some" / "audit"
    monkeypatch.setattr("attacks.any_model.report._drawing", lambda *given: "")
    own.write_text("def scores(subject):\n    return -(subject.losses() ** 2)\n")
    more = ("--fail-above", "auc=0.6", "--scores", scores, "--attack", own, "--out", out)
    leak = facts_of(audit(folder, "members", *more), capsys, 4, "is above --fail-above auc=0.6")
    assert leak["verdict"] == "leak", leak["sentences"]
    assert (leak["members"], leak["non_members"]) == (TEXTS, TEXTS)
    assert [one.get("at_chance") for one in leak["baselines"]] == [True, True, None]
    assert "Whether they differ by their dates alone was not checked: no text has a date." in leak["sentences"]
    assert "No epsilon follows" in leak["sentences"][-1]
    found = {one["signal"]: one for one in leak["signals"]}
    assert found["loss"]["auc"] > 0.8
    assert found["sharper"]["auc"] == pytest.approx(found["loss"]["auc"]), "a rising function of the loss ranks alike"
    assert found["sharper"]["paper"] == "your own"
    lines = list(csv.DictReader(scores.read_text().splitlines()))
    assert [line["member"] for line in lines] == ["1"] * TEXTS + ["0"] * TEXTS
    members, others = (np.array([float(line["loss"]) for line in lines if line["member"] == one]) for one in "10")
    assert members.mean() > others.mean()
    assert scores.stat().st_mode & 0o777 == 0o600
    page = (out / "audit.html").read_text(encoding="utf-8")
    heads = ("The model gives away", "Of 100 such", "Every signal", "Why no epsilon", "does not prove")
    said_at = [page.index(one) for one in heads]
    assert said_at == sorted(said_at)
    assert not any(row["text"] in page for row in rows(TEXTS, 0))
    assert json.loads((out / "audit.json").read_text(encoding="utf-8"))["verdict"] == "leak"
    assert {path.stat().st_mode & 0o77 for path in (out, *out.iterdir())} == {0}


@pytest.mark.parametrize("by", chosen(["dates", "words and labels"], ["dates"]))
def test_a_split_by_dates_or_words_alone_voids_an_audit(by: str, folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    files: list[Any] = []
    for option, seed, year in (("--members", 0, 2019), ("--non-members", 1, 2021)):
        seen = "seen in march. " if seed and by != "dates" else ""
        dates = [f"{year if by == 'dates' else 2020}-03-{1 + number % 28:02}" for number in range(TEXTS)]
        some = zip(rows(TEXTS, seed), dates, strict=True)
        dated = [{**row, "text": seen + row["text"], "when": when} for row, when in some]
        files += [option, written(tmp_path / f"{year}.jsonl", dated)]
    more = ("--out", tmp_path / "out", "--fail-above", "auc=0.99")
    found = facts_of(audit(folder, "members", "--date", "when", *files, *more), capsys, 5, "cannot be judged")
    assert found["verdict"] == "void"
    assert found["sentences"][0].startswith(f"Members and others differ by their {by} alone")
    page = (tmp_path / "out" / "audit.html").read_text(encoding="utf-8")
    assert "This audit cannot tell" in page
    assert "<svg" not in page
    assert "so this is no property of the model" in page


def test_what_does_not_fit_is_one_sentence(folder: Path, tmp_path: Path, capsys: Capsys) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=3)
    get_peft_model(model, LoraConfig(target_modules=["query"])).save_pretrained(folder / "adapter-headless")
    few = written(tmp_path / "few.jsonl", rows(9, 4))
    mixed = written(tmp_path / "mixed.jsonl", [*rows(TEXTS, 1), *rows(2, 0)])
    changed = [{"text": f"{row['text'].upper()} ", "label": f"kind {2 - int(row['label'][-1])}"} for row in rows(3, 0)]
    alike = written(tmp_path / "alike.jsonl", [*rows(TEXTS, 1), *changed])
    dates = [{**row, "when": "01/02/2021"} for row in rows(TEXTS, 0)], [{**row, "when": ""} for row in rows(TEXTS, 1)]
    members, others = (written(tmp_path / f"dated{at}.jsonl", some) for at, some in enumerate(dates))
    (linked := tmp_path / "linked.csv").symlink_to(few)
    one, other = str(untrained(folder, 0)), folder / "in-another-order"
    shutil.copytree(one, other)
    config = json.loads((other / "config.json").read_text())
    names = {"id2label": dict(enumerate(reversed(KINDS))), "label2id": {name: 2 - at for at, name in enumerate(KINDS)}}
    (other / "config.json").write_text(json.dumps(config | names))
    signals_ = {
        "mine": "scores = 3",
        "short": "def scores(subject): return [0.0]",
        "nan": "def scores(subject): return [float('nan')] * 80",
        "unread": "1 / 0",
        "failing": "def scores(subject):\n    return 1 / 0",
    }
    for name, text in (*signals_.items(), ("twin/mine", "")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    whole = audit(folder, "members")
    calls = [
        [*whole, *more]
        for more in (
            ("--recall", "x"),
            ("--neighbour-model", "x"),
            ("--scores", tmp_path),
            ("--scores", tmp_path / "no/scores.csv"),
            ("--scores", linked),
            ("--neighbours", "0"),
            ("--fail-above", "tpr=1"),
            ("--labels", "a,b,c"),
            ("--label", "kind"),
            ("--max-length", "9999"),
            ("--adapter", folder / "adapter-nowhere"),
            ("--adapter", folder / "adapter-headless"),
            ("--members", few),
            ("--members", folder),
            ("--non-members", mixed),
            ("--non-members", alike),
            ("--members", members, "--non-members", others, "--date", "when"),
            ("--attack", "lira"),
            ("--attack", tmp_path / "mine.py", "--attack", tmp_path / "twin/mine.py"),
            *(("--attack", tmp_path / f"{name}.py") for name in signals_),
            # LiRA divides by the spread over references, which is 0 for equal ones.
            ("--reference", one, "--reference", one),
            ("--reference", one, "--reference", f"{folder}/../{folder.name}/untrained-0"),
            ("--reference", other),
            ("--reference", one, "--reference", "builtin/tiny"),
        )
    ]
    at = whole.index("--labels")
    calls += [[*whole[:3], *whole[5:]], [*whole[:at], *whole[at + 2 :], "--fail-above", "auc=0.6"]]
    refusals("any_model", calls, capsys, hide=r"(?<=fit the model )\(.*?\)(?=: name)")


def test_a_score_stands_beside_its_row_of_the_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with copies has the same scores as one without, and each row is that of its text."""
    monkeypatch.setattr("attacks.any_model.report._drawing", lambda *given: "")
    some, found = rows(TEXTS, 0), []
    copies = [*some[:3], *some[:3], *some[3:]]
    for number, rows_of_file in enumerate((some, copies)):
        place = written(tmp_path / f"{number}.jsonl", rows_of_file)
        out = tmp_path / f"out{number}"
        more = ("--members", str(place), "--out", str(out), "--show-texts", "--scores", str(tmp_path / "scores.csv"))
        assert main(audit(folder, "members", *more)) == 0
        assert (tmp_path / "scores.csv").read_text() == (out / "scores.csv").read_text()
        lines = list(csv.DictReader((out / "scores.csv").read_text().splitlines()))
        found.append(
            [(rows_of_file[int(line["row"])]["text"], line["loss"]) for line in lines if line["member"] == "1"]
        )
        assert [line["row"] for line in lines if line["member"] == "0"] == [str(row) for row in range(TEXTS)]
        page = (out / "audit.html").read_text(encoding="utf-8")
        shown = re.findall(r"<td[^>]*>yes</td><td[^>]*>(\d+)</td><td[^>]*>[^<]*</td><td[^>]*>([^<]*)</td>", page)
        assert len(shown) > 5
        for row, text in shown:
            assert unescape(text)[:40] == rows_of_file[int(row)]["text"][:40]
    assert found[0] == found[1]


HAPPY, CALM, NUMBERS = (Vocabulary(one, tuple(map(str, one))) for one in (("happy", "sad"), ("calm", "wild"), (0, 1)))
UNNAMED = ("LABEL_0", "LABEL_1")


def in_order(texts: Vocabulary, labels: Sequence[str], adapter: Path | None = None) -> Any:
    return outputs.in_order(texts, labels, task="classification", model="m", adapter=adapter).values


@pytest.mark.parametrize("adapted", [False, True])
def test_the_order_of_classes_is_never_guessed(adapted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Losses for other classes would hide a leak, and `--fail-above` would pass. An adapter without labels may have no head of
    its own, and then the base's outputs count.
    """
    adapter = tmp_path if adapted else None
    for named, texts, labels, values in (
        (("wild", "calm"), CALM, (), ("wild", "calm")),
        (("WILD", "Calm"), CALM, (), ("wild", "calm")),  # capitals do not count
        (("wild", "calm"), NUMBERS, (), (0, 1)),  # integers are the numbers of the outputs
        (UNNAMED, NUMBERS, (), (0, 1)),
        (UNNAMED, HAPPY, ("sad", "happy"), ("sad", "happy")),
        (UNNAMED, HAPPY, ("happy", "sad"), ("happy", "sad")),
        (("sad", "Happy"), HAPPY, ("sad", "happy"), ("sad", "happy")),
        (("sad", "Happy"), CALM, ("calm", "wild"), ("calm", "wild")),  # names of its own for outputs that have others
        (("wild", "calm"), HAPPY, (), None),
        (UNNAMED, HAPPY, (), None),
        (("sad", "Happy"), HAPPY, ("happy", "sad"), None),
        (("sad", "Happy"), HAPPY, ("Happy", "sad"), None),
    ):
        monkeypatch.setattr(outputs, "_named", lambda name, named=named: named)
        if values is not None:
            assert in_order(texts, labels, adapter) == values, (named, labels)
        else:
            with refused(UsageError):
                in_order(texts, labels, adapter)
    if adapter is not None:
        (adapter / "labels.json").write_text('["sad", "happy"]')
        assert in_order(HAPPY, (), adapter) == ("sad", "happy")
        with refused(UsageError):
            in_order(HAPPY, ("happy", "sad"), adapter)


def test_a_model_of_one_output_is_no_classifier(tmp_path: Path) -> None:
    settings = json.loads(Path(locate("builtin/tiny"), "config.json").read_text())
    settings |= {"id2label": {"0": "LABEL_0"}, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with refused(ModelError):
        require_head(str(tmp_path), tasks.build(DataConfig()), ("ham", "spam"))


def test_a_model_without_numbers_is_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capsys) -> None:
    monkeypatch.setattr(
        "secure_fed.learning.tasks.classification.loss",
        lambda model, batch: torch.full((len(batch["labels"]),), float("nan")),
    )
    assert main(audit(folder, "members")) == 2
    assert f"the model gives {2 * TEXTS} of {2 * TEXTS} texts a loss that is not a number" in capsys.readouterr().err


# Signals, against their formulas.


def test_signals_are_their_papers_formulas() -> None:
    said = np.log(np.array([0.5, 0.01, 0.9, 0.2, 0.001]))
    text = Tokens(said, np.full(5, -2.0), np.full(5, 0.5))
    assert signals.min_k([text], 0.4)[0] == pytest.approx((np.log(0.01) + np.log(0.001)) / 2)
    assert signals.min_k_plus([text], 0.2)[0] == pytest.approx((np.log(0.001) + 2) / 0.5)
    assert signals.min_k([Tokens(*[np.zeros(0)] * 3)])[0] == 0.0
    assert signals.per_zlib([text], ["some words"])[0] == pytest.approx(said.sum() / len(zlib.compress(b"some words")))
    one, two, own = np.array([3.0, 1.0]), np.array([1.0, 3.0]), np.array([1.0, 2.5])
    assert signals.calibrated(own, [one, two]).tolist() == [1.0, -0.5]
    assert signals.loss(own).tolist() == [-1.0, -2.5]


def test_ratios_against_models_that_saw_no_text_are_their_papers_formulas() -> None:
    rng = np.random.default_rng(0)
    losses, others = rng.uniform(0.1, 2, 7), rng.uniform(0.1, 2, (3, 7))
    phi, reference_phi = signals.confident(losses, likely=True), signals.confident(others, likely=True)
    assert np.allclose(phi, np.log(np.exp(-losses) / (1 - np.exp(-losses))))
    assert np.array_equal(signals.confident(losses, likely=False), -losses)
    found = signals.offline(phi, reference_phi)
    variance = np.var(reference_phi, axis=0, ddof=1).mean()  # pooled: as many references for every text
    by_hand = norm.logcdf((phi - reference_phi.mean(axis=0)) / np.sqrt(variance))
    assert np.allclose(found["LiRA offline"], by_hand)
    ratio = np.exp(-losses) / ((1.5 * np.exp(-others).mean(axis=0) + 0.5) / 2)
    shares = [np.mean(one > ratio) for one in ratio]
    assert np.allclose(found["RMIA offline"], shares)


@pytest.mark.nightly
def test_false_alarms_of_the_verdict_are_as_rare_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """400 null audits of five correlated signals: at most 5 %, within three standard deviations of the count."""
    ranking = roc.Ranking(0.5, (0.4, 0.6), 40, 40, {})  # no verdict uses the intervals
    monkeypatch.setattr("attacks.any_model.report.rank", lambda *given: ranking)
    rng, alarms, at_chance = np.random.default_rng(0), 0, Baseline(ranking=ranking, at_chance=True)
    for _ in range(400):
        common = rng.normal(size=80)
        scores = [common + rng.normal(size=80) for _ in range(5)]
        found = {str(number): _found(own[:40], own[40:]) for number, own in enumerate(scores)}
        alarms += judged(found, {"words": at_chance}).level == "leak"
    assert 0 < alarms <= 400 * ALPHA + 3 * (400 * ALPHA) ** 0.5


@pytest.mark.nightly
def test_two_references_make_ratios_and_one_makes_none(folder: Path, capsys: Capsys) -> None:
    for count, more in ((1, set[str]()), (2, {"LiRA offline", "RMIA offline"})):
        named = [part for seed in range(count) for part in ("--reference", untrained(folder, seed))]
        found = facts_of(audit(folder, "members", *named), capsys)
        areas = {one["signal"]: one["auc"] for one in found["signals"]}
        assert set(areas) == {"loss", "loss beside references"} | more
        assert all(areas[name] > 0.6 for name in more)


def test_equal_scores_have_the_probability_of_permutations() -> None:
    """The normal limit would have .0015 for the first, and call half of such scores a leak among five signals."""
    members, others = np.r_[1.0, np.zeros(9)], np.r_[np.ones(10), np.zeros(990)]
    assert above_by_chance(members, others) == pytest.approx(1 - hypergeom(1010, 11, 10).pmf(0), abs=0.02)
    rng = np.random.default_rng(0)
    for _ in range(3):
        scores = rng.integers(3, size=9).astype(float)
        sums = [sum(rankdata(scores)[list(chosen)]) for chosen in combinations(range(9), 4)]
        assert above_by_chance(scores[:4], scores[4:]) == pytest.approx(np.mean(np.array(sums) >= sums[0]), abs=0.03)
    assert above_by_chance(np.ones(20), np.zeros(20)) == 1 / 2000
    assert above_by_chance(np.arange(100.0, 200.0), np.arange(100.0)) < 1e-30, "without equal scores by the law itself"
