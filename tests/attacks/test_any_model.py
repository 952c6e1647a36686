"""Audits of models trained without secure-fed: plain Transformers and PEFT train them here."""

from __future__ import annotations

import csv
import json
import re
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
from attacks.any_model.report import ALPHA, _found, above_by_chance, audited, judged
from attacks.any_model.subject import Asked, Texts, Tokens, _distinct, _parts, opened
from attacks.evidence.baseline import Baseline
from secure_fed.commands.cli import main
from secure_fed.config import DataConfig
from secure_fed.errors import ModelError, UsageError
from secure_fed.learning import tasks
from secure_fed.learning.data import notes
from secure_fed.learning.data.rows import Vocabulary
from secure_fed.learning.models.locate import locate

TEXTS, LENGTH = 40, 24
KINDS = ("kind 0", "kind 1", "kind 2")  # the classes, in the order of the models' outputs, which have no names


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Notes with random labels, which can only be memorised; seeds differ by chance."""
    made, rng = notes.generate(400, seed=0, split="train"), np.random.default_rng(seed)
    order = np.random.default_rng(0).permutation(400)[seed * TEXTS :][:count]
    return [{"text": made.text[index], "label": f"kind {rng.integers(3)}"} for index in order]


def written(path: Path, some: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in some), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Members, others, and two adapters trained by plain PEFT: one on the members, one on other texts."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tmp = tmp_path_factory.mktemp("others")
    groups = {name: rows(TEXTS, seed) for seed, name in enumerate(("members", "others", "elsewhere"))}
    for name, some in groups.items():
        written(tmp / f"{name}.jsonl", some)
    tokenizer = AutoTokenizer.from_pretrained(locate("builtin/tiny"))
    for name in ("members", "elsewhere"):
        torch.manual_seed(0)
        model: Any = AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=3)
        config = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules=["query", "value"])
        model = get_peft_model(model, config)
        batch = tokenizer(
            [row["text"] for row in groups[name]], padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
        )
        labels = torch.tensor([int(row["label"][-1]) for row in groups[name]])
        optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            model(**batch, labels=labels).loss.backward()
            optimizer.step()
        model.save_pretrained(tmp / f"adapter-{name}")
    return tmp


def untrained(folder: Path, seed: int) -> Path:
    """A model that never saw any text, with its own head."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    place = folder / f"untrained-{seed}"
    torch.manual_seed(seed)
    AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=3).save_pretrained(place)
    AutoTokenizer.from_pretrained(locate("builtin/tiny")).save_pretrained(place)
    return place


def audit(folder: Path, adapter: str, *more: str) -> list[str]:
    texts = ["--members", str(folder / "members.jsonl"), "--non-members", str(folder / "others.jsonl")]
    return [
        "audit",
        "model",
        "builtin/tiny",
        "--adapter",
        str(folder / f"adapter-{adapter}"),
        *texts,
        "--max-length",
        str(LENGTH),
        "--labels",
        ",".join(KINDS),
        *more,
    ]


def test_an_overfitted_adapter_is_found_and_one_that_never_saw_the_members_is_not(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(audit(folder, "members", "--json")) == 0
    leak = json.loads(capsys.readouterr().out)
    assert leak["verdict"] == "leak", leak["sentences"]
    assert leak["signals"][0]["auc"] > 0.8
    assert [one.get("at_chance") for one in leak["baselines"]] == [True, True, None]
    assert "No epsilon follows" in leak["sentences"][-1]
    assert main(audit(folder, "elsewhere", "--json")) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "nothing"


def test_a_pipeline_learns_of_a_leak_by_the_exit_status(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = tmp_path / "scores.csv"
    assert main(audit(folder, "members", "--fail-above", "auc=0.6", "--scores", str(scores))) == 4
    told, said = capsys.readouterr()
    assert "is above --fail-above auc=0.6" in said
    assert "LEAK" in told
    assert f"{TEXTS} members and {TEXTS} others" in told
    lines = list(csv.DictReader(scores.read_text().splitlines()))
    assert [line["member"] for line in lines] == ["1"] * TEXTS + ["0"] * TEXTS
    members, others = (np.array([float(line["loss"]) for line in lines if line["member"] == one]) for one in "10")
    assert members.mean() > others.mean()
    assert scores.stat().st_mode & 0o777 == 0o600
    assert main(audit(folder, "members", "--fail-above", "auc=0.999")) == 0


@pytest.mark.nightly
def test_texts_that_differ_by_their_words_alone_void_the_audit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dated = written(
        tmp_path / "dated.jsonl", [{**row, "text": "seen in march. " + row["text"]} for row in rows(TEXTS, 1)]
    )
    arguments = audit(folder, "members", "--json")
    arguments[arguments.index("--non-members") + 1] = str(dated)
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "void"
    assert found["sentences"][0].startswith("Members and others differ by their words and labels alone")
    assert main([*arguments, "--fail-above", "auc=0.99"]) == 5
    assert "cannot be judged" in capsys.readouterr().err


def test_a_split_by_date_voids_the_audit_though_no_text_says_a_date(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*audit(folder, "members", "--json"), "--date", "when"]
    for option, seed, year in (("--members", 0, 2019), ("--non-members", 1, 2021)):
        dated = [{**row, "when": f"{year}-03-{1 + number % 28:02}"} for number, row in enumerate(rows(TEXTS, seed))]
        arguments[arguments.index(option) + 1] = str(written(tmp_path / f"{year}.jsonl", dated))
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "void"
    assert found["sentences"][0].startswith("Members and others differ by their dates alone")
    assert {one["by"]: one["at_chance"] for one in found["baselines"]}["dates"] is False


def test_what_does_not_fit_is_one_sentence(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = written(tmp_path / "few.jsonl", rows(9, 4))
    mixed = written(tmp_path / "mixed.jsonl", [*rows(TEXTS, 1), *rows(2, 0)])
    changed = [{"text": f"{row['text'].upper()} ", "label": f"kind {2 - int(row['label'][-1])}"} for row in rows(3, 0)]
    alike = written(tmp_path / "alike.jsonl", [*rows(TEXTS, 1), *changed])
    dates = [{**row, "when": "01/02/2021"} for row in rows(TEXTS, 0)], [{**row, "when": ""} for row in rows(TEXTS, 1)]
    dated = [str(written(tmp_path / f"dated{at}.jsonl", some)) for at, some in enumerate(dates)]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    twins = [str(tmp_path / name / "mine.py") for name in ("a", "b")]
    (linked := tmp_path / "linked.csv").symlink_to(few)
    for arguments, said in (
        (audit(folder, "members", "--recall", "x"), "--recall is for language models, and the task is classification"),
        (audit(folder, "members", "--neighbour-model", "x"), "give their number with --neighbours"),
        (audit(folder, "members", "--scores", str(tmp_path)), "cannot be written: it is a folder; name another file"),
        (audit(folder, "members", "--scores", str(tmp_path / "no/scores.csv")), "cannot be written: No such file"),
        (audit(folder, "members", "--scores", str(linked)), "cannot be written: it is a link or a device"),
        (audit(folder, "members", "--neighbours", "0"), "--neighbours is 0: give a number"),
        (audit(folder, "members", "--fail-above", "tpr=1"), "--fail-above is 'tpr=1'"),
        (audit(folder, "members", "--labels", "a,b,c"), "--labels leaves out 'kind 0'"),
        (audit(folder, "members", "--label", "kind"), "has no column 'kind': it has"),
        (audit(folder, "members", "--max-length", "9999"), "set --max-length to at most"),
        ([*audit(folder, "nowhere")], "does not fit the model"),
        ([one for one in audit(folder, "x") if "adapter" not in one], "without a head ForSequenceClassification"),
        ([*audit(folder, "members")[:6], str(few), *audit(folder, "members")[7:]], "there are 9 members and 40 others"),
        (
            audit(folder, "members", "--non-members", str(mixed)),
            "2 texts are both in --members and in --non-members, such as",
        ),
        (
            audit(folder, "members", "--non-members", str(alike)),
            "3 texts are both in --members and in --non-members, such as row 1 of --members (labels, white space",
        ),
        (
            audit(folder, "members", "--members", dated[0], "--non-members", dated[1], "--date", "when"),
            "row 1 of --members has '01/02/2021' in the column 'when', which --date cannot read: write dates as",
        ),
        (audit(folder, "members", "--attack", twins[0], "--attack", twins[1]), "is a signal named 'mine' too: rename"),
    ):
        assert main([str(one) for one in arguments]) == 2, arguments
        told = capsys.readouterr().err
        assert said in told, told
        assert "separating them without any model" not in told, "the audit was made first"
        assert "Traceback" not in told


def test_copies_of_a_row_count_once(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    some = rows(TEXTS, 0)
    place = written(tmp_path / "members.jsonl", [*some, *some[:9], {**some[0], "label": "kind 9"}, *rows(TEXTS, 0)])
    files = place, folder / "others.jsonl"
    asked = Asked("builtin/tiny", *files, DataConfig("", "of the user"), labels=(*KINDS, "kind 9"), max_length=LENGTH)
    parts = _parts(asked, tasks.build(asked.data))
    assert _distinct(parts[0]) == (*range(TEXTS), TEXTS + 9)
    assert (
        main(audit(folder, "members", "--members", str(written(tmp_path / "twice.jsonl", some + some)), "--json")) == 0
    )
    assert json.loads(capsys.readouterr().out)["members"] == TEXTS


def test_a_score_stands_beside_its_row_of_the_file(folder: Path, tmp_path: Path) -> None:
    """A file with copies has the same scores as one without, and each row is that of its text."""
    some, found = rows(TEXTS, 0), []
    for number, rows_of_file in enumerate((some, [*some[:3], *some[:3], *some[3:]])):
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


_ask = partial(outputs.in_order, task="classification", model="m", adapter=None)


def test_classes_are_those_of_the_models_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outputs, "_named", lambda name: ("wild", "calm"))
    ask = partial(_ask, labels=())
    assert ask(Vocabulary(("calm", "wild"), ("calm", "wild"))).values == ("wild", "calm")
    assert ask(Vocabulary(("Calm", "Wild"), ("Calm", "Wild"))).values == ("Wild", "Calm"), "capitals do not count"
    assert ask(Vocabulary((0, 1), ("0", "1"))).values == (0, 1), "numbers are those of the outputs"
    with pytest.raises(UsageError, match=r"the texts have the class 'happy', .* name the classes .* with --labels"):
        ask(Vocabulary(("happy", "sad"), ("happy", "sad")))


def test_the_order_of_classes_is_never_guessed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Losses for other classes would hide a leak, and `--fail-above` would pass."""
    texts = Vocabulary(("happy", "sad"), ("happy", "sad"))
    monkeypatch.setattr(outputs, "_named", lambda name: ("LABEL_0", "LABEL_1"))
    with pytest.raises(UsageError, match=r"the class 'happy', and MODEL m has no names .* with --labels"):
        _ask(texts, ())
    with pytest.raises(UsageError, match=r"the class 'happy', and --adapter .* has no names .* with --labels"):
        _ask(texts, (), adapter=tmp_path)
    for labels in (("sad", "happy"), ("happy", "sad")):
        assert _ask(texts, labels).values == _ask(texts, labels, adapter=tmp_path).values == labels
    assert _ask(Vocabulary((0, 1), ("0", "1")), ()).values == (0, 1), "integers are the numbers of the outputs"
    assert _ask(Vocabulary((0, 1), ("0", "1")), (), adapter=tmp_path).values == (0, 1)


def test_labels_in_another_order_than_the_models_own_are_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    texts = Vocabulary(("happy", "sad"), ("happy", "sad"))
    monkeypatch.setattr(outputs, "_named", lambda name: ("sad", "Happy"))
    for labels in (("happy", "sad"), ("Happy", "sad")):
        with pytest.raises(UsageError, match=r"in the order 'sad, Happy': leave out --labels, or correct id2label"):
            _ask(texts, labels)
    assert _ask(texts, ("sad", "happy")).values == ("sad", "happy")
    (tmp_path / "labels.json").write_text('["sad", "happy"]')
    with pytest.raises(UsageError, match=r"in the order 'sad, happy': leave out --labels, or correct its labels.json"):
        _ask(texts, ("happy", "sad"), adapter=tmp_path)
    assert _ask(texts, (), adapter=tmp_path).values == ("sad", "happy")
    other = Vocabulary(("up", "down"), ("up", "down"))
    assert _ask(other, ("up", "down")).values == ("up", "down"), "names of its own for outputs that have others"


def test_an_adapter_without_names_asks_for_labels(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = audit(folder, "members", "--fail-above", "auc=0.6")
    at = arguments.index("--labels")
    assert main(arguments[:at] + arguments[at + 2 :]) == 2
    told = capsys.readouterr().err
    assert "the texts have the class 'kind 0', and --adapter" in told
    assert len(told.splitlines()) == 1


def test_an_adapter_without_a_head_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(locate("builtin/tiny"), num_labels=3)
    get_peft_model(model, LoraConfig(target_modules=["query"])).save_pretrained(folder / "adapter-headless")
    assert main(audit(folder, "headless")) == 2
    assert "has no classifier.weight, and builtin/tiny has no head for" in capsys.readouterr().err
    assert main(audit(folder, "members", "--members", str(folder))) == 2
    assert "--members is the folder" in capsys.readouterr().err


def test_a_model_that_gives_no_numbers_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
def test_two_references_make_ratios_and_one_makes_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for count, more in ((1, set[str]()), (2, {"LiRA offline", "RMIA offline"})):
        named = [part for seed in range(count) for part in ("--reference", str(untrained(folder, seed)))]
        assert main([str(one) for one in audit(folder, "members", "--json", *named)]) == 0
        areas = {one["signal"]: one["auc"] for one in json.loads(capsys.readouterr().out)["signals"]}
        assert set(areas) == {"loss", "loss beside references"} | more
        assert all(areas[name] > 0.6 for name in more)


def test_a_reference_is_another_model_and_named_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """LiRA divides by the spread over references, which is 0 for equal ones."""
    one, other = str(untrained(folder, 0)), folder / "in-another-order"
    shutil.copytree(one, other)
    config = json.loads((other / "config.json").read_text())
    names = {"id2label": dict(enumerate(reversed(KINDS))), "label2id": {name: 2 - at for at, name in enumerate(KINDS)}}
    (other / "config.json").write_text(json.dumps(config | names))
    capsys.readouterr()
    for named, said in (
        ([one, one], "untrained-0 is given twice: leave it out"),
        ([one, f"{folder}/../{folder.name}/untrained-0"], "untrained-0 is given twice"),
        (
            [str(other)],
            "in-another-order names its outputs 'kind 2, kind 1, kind 0', and the model's are 'kind 0, kind 1,",
        ),
        ([one, "builtin/tiny"], "--reference builtin/tiny is MODEL itself"),
    ):
        more = [part for name in named for part in ("--reference", name)]
        assert main(audit(folder, "members", *more)) == 2, named
        told = capsys.readouterr().err
        assert said in told
        assert len([line for line in told.splitlines() if "reading the" not in line]) == 1


def test_the_distribution_of_a_token_is_the_models_own(tmp_path: Path) -> None:
    """mean and deviation of log-likelihoods, by drawing tokens from a model of five words."""
    scores = torch.tensor([[0.1, 2.0, -1.0, 0.5, 0.0]]).log_softmax(1).double()
    drawn = scores[0, torch.multinomial(scores.exp()[0], 200_000, replacement=True)]
    mean = float((scores.exp() * scores).sum())
    deviation = float(((scores.exp() * scores.square()).sum() - mean**2).sqrt())
    assert (mean, deviation) == pytest.approx((float(drawn.mean()), float(drawn.std())), rel=0.02)


def learn(model: Any, texts: Sequence[Any], epochs: int) -> None:
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=3e-3)
    for _ in range(epochs):
        for ids in texts:
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()


@pytest.mark.nightly
def test_a_language_model_that_learned_texts_by_heart_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its base was trained on other texts of the same kind, and its adapter on the members, for many steps."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

    tokenizer = AutoTokenizer.from_pretrained(locate("builtin/tiny"))
    groups = {name: rows(TEXTS, seed) for seed, name in enumerate(("members", "others", "elsewhere"))}
    files = [written(tmp_path / f"{name}.jsonl", groups[name]) for name in ("members", "others")]
    cut = {"return_tensors": "pt", "truncation": True, "max_length": LENGTH}
    read = {name: [tokenizer(row["text"], **cut)["input_ids"] for row in some] for name, some in groups.items()}
    torch.manual_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=64, n_layer=2, n_head=2))
    learn(model, read["elsewhere"], 8)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "base")
    places = ["c_attn", "c_fc", "c_proj"]
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, target_modules=places))
    learn(model, read["members"], 30)
    model.save_pretrained(tmp_path / "adapter")
    texts = ["--members", str(files[0]), "--non-members", str(files[1]), "--task", "causal_lm"]
    run = ["audit", "model", str(tmp_path / "base"), *texts, "--max-length", str(LENGTH), "--json"]
    assert main([*run, "--adapter", str(tmp_path / "adapter")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "leak", found
    assert found["references"] == ["base model"]
    areas = {one["signal"]: one["auc"] for one in found["signals"]}
    assert set(areas) == {"loss", "loss beside references", "loss by zlib", "Min-K %", "Min-K %++"}
    assert areas["loss beside references"] > 0.7
    assert main(run) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "nothing"


@pytest.mark.nightly
def test_false_alarms_of_the_verdict_are_as_rare_as_it_says() -> None:
    """400 null audits of five correlated signals: at most 5 %, within three standard deviations of the count."""
    rng, alarms, at_chance = np.random.default_rng(0), 0, Baseline(ranking=None, at_chance=True)  # type: ignore[arg-type]
    trials = 400
    for _ in range(trials):
        common = rng.normal(size=80)
        scores = [common + rng.normal(size=80) for _ in range(5)]
        found = {str(number): _found_quickly(own[:40], own[40:]) for number, own in enumerate(scores)}
        alarms += judged(found, {"words": at_chance}).level == "leak"
    assert 0 < alarms <= trials * ALPHA + 3 * (trials * ALPHA) ** 0.5


@pytest.mark.nightly
def test_whole_audits_of_fair_splits_are_void_or_a_leak_as_rarely_as_they_say(folder: Path) -> None:
    """200 audits of a model that saw none of the texts, each with other halves as members: at most 5 % of either verdict.

    Both counts are beyond 19 with a probability of 1/400 if the levels are kept, and all audits share their 80 texts.
    """
    files = folder / "members.jsonl", folder / "others.jsonl"
    adapter = folder / "adapter-elsewhere"
    asked = Asked("builtin/tiny", *files, DataConfig("x"), adapter=adapter, labels=KINDS, max_length=LENGTH)
    subject = opened(asked)
    rng, levels = np.random.default_rng(0), []
    for _ in range(200):
        mixed = subject.texts.rows.take(rng.permutation(2 * TEXTS).tolist())
        texts = Texts(mixed, TEXTS, subject.task.encode(subject.tokenizer, mixed, LENGTH))
        levels.append(audited(replace(subject, texts=texts), lambda what: None).verdict.level)
    assert levels.count("leak") <= 19
    assert levels.count("void") <= 19
    assert set(levels) == {"leak", "void", "nothing"}


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


def test_what_was_not_checked_is_said() -> None:
    at_chance = Baseline(ranking=None, at_chance=True)  # type: ignore[arg-type]
    found = {"loss": _found_quickly(np.arange(40.0), np.arange(40.0) + 0.5)}
    said = judged(found, {"words": at_chance, "dates": "no text has a date"}).sentences
    assert "Whether they differ by their dates alone was not checked: no text has a date." in said


def _found_quickly(members: Any, others: Any) -> Any:
    """As `_found`, without intervals, which no verdict uses."""
    from unittest.mock import patch

    from secure_fed.runs import roc

    ranking = roc.Ranking(0.5, (0.4, 0.6), len(members), len(others), {})
    with patch("attacks.any_model.report.rank", lambda *given: ranking):
        return _found(members, others)


# Files.


def test_the_page_says_the_verdict_first_and_holds_no_text_that_was_not_asked_for(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "some" / "audit"
    assert main(audit(folder, "members", "--out", str(out))) == 0
    assert f"report: {out / 'audit.html'}" in capsys.readouterr().out
    page = (out / "audit.html").read_text(encoding="utf-8")
    said = [
        page.index(one)
        for one in ("The model gives away", "Of 100 such", "Every signal", "Why no epsilon", "does not prove")
    ]
    assert said == sorted(said)
    texts = [row["text"] for row in rows(TEXTS, 0)]
    assert not any(text in page for text in texts)
    told = json.loads((out / "audit.json").read_text(encoding="utf-8"))
    assert told["verdict"] == "leak"
    assert len((out / "scores.csv").read_text(encoding="utf-8").splitlines()) == 2 * TEXTS + 1
    assert {path.stat().st_mode & 0o77 for path in (out, *out.iterdir())} == {0}
    assert main(audit(folder, "members", "--out", str(out), "--show-texts", "--json")) == 0
    assert json.loads(capsys.readouterr().out) == told
    assert any(text[:100] in (out / "audit.html").read_text(encoding="utf-8") for text in texts)


def test_a_void_audit_draws_no_curve(folder: Path, tmp_path: Path) -> None:
    dated = [{**row, "text": "seen in march. " + row["text"]} for row in rows(TEXTS, 1)]
    arguments = audit(folder, "members", "--out", str(tmp_path / "out"))
    arguments[arguments.index("--non-members") + 1] = str(written(tmp_path / "dated.jsonl", dated))
    assert main(arguments) == 0
    page = (tmp_path / "out" / "audit.html").read_text(encoding="utf-8")
    assert "This audit cannot tell" in page
    assert "<svg" not in page
    assert "so this is no property of the model" in page


# A signal of the user's own.


def test_a_signal_of_ones_own_stands_beside_the_others(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "sharper.py"
    own.write_text("def scores(subject):\n    return -(subject.losses() ** 2)\n")
    assert main(audit(folder, "members", "--attack", str(own), "--json")) == 0
    found = {one["signal"]: one for one in json.loads(capsys.readouterr().out)["signals"]}
    assert found["sharper"]["auc"] == pytest.approx(found["loss"]["auc"]), "a rising function of the loss ranks alike"
    assert found["sharper"]["paper"] == "your own"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("scores = 3", "has no function scores(subject)"),
        ("def scores(subject): return [0.0]", "returned float64 of shape (1,): it must return 80 finite numbers"),
        ("def scores(subject): return [float('nan')] * 80", "returned float64 of shape (80,)"),
        ("1 / 0", "cannot be executed (ZeroDivisionError"),
        ("def scores(subject):\n    return 1 / 0", "failed at line 2 (ZeroDivisionError: division by zero)"),
    ],
)
def test_a_file_that_is_no_signal_is_one_sentence(
    text: str, said: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "mine.py"
    own.write_text(text)
    assert main(audit(folder, "members", "--attack", str(own))) == 2
    assert said in capsys.readouterr().err


def test_listed_attacks_are_no_choice_here(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(audit(folder, "members", "--attack", "lira")) == 2
    assert "--attack is 'lira': give a .py file" in capsys.readouterr().err


def test_the_base_names_the_classes_of_an_adapter_that_names_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter without labels may have no head of its own, and then the base's outputs count."""
    monkeypatch.setattr(outputs, "_named", lambda name: ("no", "yes", "maybe"))
    sorted_ = Vocabulary(("maybe", "no", "yes"), ("maybe", "no", "yes"))
    ordered = partial(outputs.in_order, sorted_, task="classification", model="base", adapter=tmp_path)
    assert ordered(()).names == ("no", "yes", "maybe")
    with pytest.raises(UsageError, match="the model names its outputs in the order 'no, yes, maybe'"):
        ordered(("maybe", "no", "yes"))
    monkeypatch.setattr(outputs, "_named", lambda name: ("LABEL_0", "LABEL_1", "LABEL_2"))
    assert ordered(("yes", "maybe", "no")).names == ("yes", "maybe", "no")
    with pytest.raises(UsageError, match="has no names for its outputs: name all of its classes"):
        ordered(())


def test_a_model_of_one_output_is_no_classifier(tmp_path: Path) -> None:
    settings = json.loads(Path(locate("builtin/tiny"), "config.json").read_text())
    settings |= {"id2label": {"0": "LABEL_0"}, "architectures": ["BertForSequenceClassification"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match=r"has one output, and an audit of .* needs one for each class"):
        require_head(str(tmp_path), tasks.build(DataConfig()), ("ham", "spam"))
