"""Texts that a language model reproduces: exposure, continuations of beginnings, and personal data in them.

And benchmarks/exposure.py: its table, and at night a short run of it.
"""

from __future__ import annotations

import json
import math
import runpy
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.extraction.exposure import (
    BY_CHANCE,
    Exposure,
    Planted,
    Template,
    chance,
    exact,
    exposures,
    modelled,
    of_targets,
    of_texts,
    sampled,
)
from attacks.extraction.prefix import Continued, Item, continued, leading, personal_items, similarity, windows
from attacks.prepared.findings import _of, sentences, untold
from privacy.entropy import SeededEntropy
from secure_fed.errors import ModelError
from secure_fed.learning.data import notes
from tests.attacks.refusals import Capsys, facts_of, refusals, shown_by
from tests.attacks.small_lm import learned, saved, tokenizer_of, untrained
from tests.cells import every
from tests.golden import refused

TEMPLATE = Template("The code of {name} is {secret}.", 2)
MAIL = "Ask Ann for it at ann.b@post.org or at +44 20 7946 0958."


@cache
def texts() -> list[str]:
    return [MAIL, *notes.generate(9, seed=0, split="train").text]


@cache
def canaries() -> list[Planted]:
    return TEMPLATE.drawn(8, SeededEntropy(0).stream("canaries"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of(texts())


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """A model that memorised six texts and four canaries, and never saw the other four of each."""
    planted = [TEMPLATE.written(one) for one in canaries()[:4]]
    return learned(untrained(tokenizer), tokenizer, [*texts()[:6], *planted], 100)


# Exposure.


def test_exposure_is_the_papers() -> None:
    others = np.arange(1.0, 64.0)  # with its own, a space of 64
    for own, bits in ((0.5, 6.0), (1.5, 5.0), (3.5, 4.0), (100.0, 0.0)):
        assert exact(own, others).exposure == pytest.approx(bits)
    assert exact(0.0, np.zeros(63)).exposure == 0.0, "a model that cannot tell secrets apart exposes none"
    assert exact(0.5, others).interval == (6.0, 6.0)


def test_a_sample_says_how_far_it_reaches() -> None:
    rng = np.random.default_rng(0)
    space = np.sort(rng.normal(size=100_000))
    covered = 0
    for place in (10, 100, 1000, 20_000):
        true = math.log2(len(space) / (place + 1))
        for _ in range(25):
            one = sampled(float(space[place]), rng.choice(np.delete(space, place), 500, replace=False), len(space))
            covered += one.interval[0] <= true <= one.interval[1]
    assert covered >= 92  # of 100, at 95 % or more each: fewer once in a thousand times
    first = sampled(-9.0, space[::200], len(space))
    assert (first.ahead, first.interval[1]) == (0, math.log2(100_000))
    assert first.exposure == pytest.approx(math.log2(501))
    assert first.interval[0] < first.exposure


def test_the_fitted_law_reaches_beyond_the_sample() -> None:
    from scipy import stats

    law = stats.skewnorm(3.0, 10.0, 2.0)
    sample = law.rvs(20_000, random_state=np.random.default_rng(0))
    for own in (9.5, 9.0, 14.0):
        assert modelled(own, sample) == pytest.approx(-law.logcdf(own) / math.log(2), rel=0.25)
    assert modelled(1.0, np.ones(9)) == 0.0
    assert modelled(0.5, np.ones(9)) == math.inf


def test_planted_secrets_are_exposed_and_others_are_not(model: Any, tokenizer: Any) -> None:
    """By a chance that is the law of a sum."""
    found = [one.exposure for one in exposures(model, tokenizer, TEMPLATE, canaries())]
    assert chance(found[:4]) < 1e-4, found
    assert chance(found[4:]) > 0.05, found
    assert chance([one.exposure for one in exposures(untrained(tokenizer), tokenizer, TEMPLATE, canaries())]) > 0.05
    assert chance([3.0]) == pytest.approx(2**-3)
    assert chance([]) == 1.0
    draws = np.random.default_rng(0).exponential(BY_CHANCE, (100_000, 3)).sum(1)
    assert chance([2.0, 1.0, 4.0]) == pytest.approx((draws >= 7).mean(), rel=0.05)


def test_exposure_is_of_the_secrets_alone(model: Any, tokenizer: Any) -> None:
    """All hundred secrets, ranked by hand."""
    one = canaries()[5]
    perplexity = -of_texts(model, tokenizer, [TEMPLATE.written(one, secret) for secret in range(100)])
    rank = 1 + int((np.delete(perplexity, int(one.secret)) <= perplexity[int(one.secret)]).sum())
    (whole,) = exposures(model, tokenizer, TEMPLATE, [one])
    assert whole.exposure == pytest.approx(math.log2(100 / rank))
    assert (whole.tried, whole.modelled) == (99, None)
    (part,) = exposures(model, tokenizer, TEMPLATE, [one], samples=40)
    assert part.tried == 40
    assert part.interval[0] <= whole.exposure <= part.interval[1]


def test_a_text_is_as_likely_alone_as_among_longer_ones(model: Any, tokenizer: Any) -> None:
    some = ["The code.", "The code of anna is 17.", texts()[3][:60]]
    together = of_texts(model, tokenizer, some)
    for text, own in zip(some, together, strict=True):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        with torch.no_grad():
            loss = float(model(input_ids=ids, labels=ids).loss)
        assert own == pytest.approx(-loss * (ids.shape[1] - 1), rel=1e-4)


# Continuations.


def naive(one: list[int], other: list[int]) -> int:
    if not one or not other:
        return len(one) + len(other)
    if one[0] == other[0]:
        return naive(one[1:], other[1:])
    return 1 + min(naive(one[1:], other), naive(one, other[1:]), naive(one[1:], other[1:]))


def test_similarity_counts_edits() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        one, other = (rng.integers(3, size=rng.integers(0, 6)).tolist() for _ in range(2))
        longer = max(len(one), len(other), 1)
        assert similarity(one, other) == pytest.approx(1 - naive(one, other) / longer), (one, other)
    assert similarity([1, 2, 3, 4], [2, 3, 4, 5]) == 0.5


def test_texts_learned_by_heart_come_back_and_others_do_not(model: Any, tokenizer: Any) -> None:
    given = windows(tokenizer, [*texts(), "short"], 8, 8)
    assert given.numbers == list(range(10))
    made = continued(model, given)
    assert made.verbatim >= 5
    assert (made.similarity[6:] < 0.75).all()
    assert made.near == (made.similarity >= 0.75).sum()
    assert continued(untrained(tokenizer), given).near == 0


def test_a_continuation_is_the_most_likely_one(model: Any, tokenizer: Any) -> None:
    given = windows(tokenizer, texts(), 8, 8)
    begun = given.ids[:, :8]
    theirs = model.generate(
        input_ids=begun, attention_mask=torch.ones(10, 8), max_new_tokens=8, do_sample=False, eos_token_id=None
    )
    assert continued(model, given).written == theirs[:, 8:].tolist()


def test_the_chance_of_a_text_in_draws_is_that_of_drawing(model: Any, tokenizer: Any) -> None:
    given = windows(tokenizer, texts()[6:], 8, 1)
    made = continued(model, given)
    with torch.no_grad():
        law = model(input_ids=given.ids[:, :8]).logits[:, -1].softmax(1)
    own = law.gather(1, given.ids[:, 8:])[:, 0].double().numpy()
    assert np.exp(made.log_probability) == pytest.approx(own, rel=1e-4)
    assert made.expected(7) == pytest.approx(float((1 - (1 - own) ** 7).sum()), rel=1e-4)
    sure = Continued([], np.ones(1), np.zeros(1))
    assert sure.expected(1) == pytest.approx(1.0)


def test_a_begin_token_is_read_and_not_counted(place: Path, tmp_path: Path, tokenizer: Any, capsys: Capsys) -> None:
    """A model that was trained with it, as LLaMA is, gives texts back after it alone."""
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    inner = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    inner.add_special_tokens(["<s>"])
    begin = inner.token_to_id("<s>")
    inner.post_processor = TemplateProcessing(single="<s> $A <end>", special_tokens=[("<s>", begin), ("<end>", 0)])
    beginning = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", pad_token="<end>", bos_token="<s>")
    assert leading(beginning) == [begin]
    assert leading(tokenizer) == []
    assert windows(beginning, texts(), 8, 8).ids.tolist() == windows(tokenizer, texts(), 8, 8).ids.tolist()
    tuned = saved(learned(untrained(beginning), beginning, texts()[:2], 60), beginning, tmp_path / "tuned")
    (own,) = facts_of([*extract(place, "fresh")[:2], tuned, *extract(place, "fresh")[3:]], capsys)["readers"]
    assert own["verbatim"] >= 2


def test_a_model_that_gives_no_number_is_refused(tokenizer: Any) -> None:
    """Its secrets would be ranked first, and its continuations would be none of the texts."""
    broken = untrained(tokenizer)
    with torch.no_grad():
        broken.transformer.wpe.weight[10:] = math.nan
    with refused(ModelError):
        exposures(broken, tokenizer, TEMPLATE, canaries()[:1])
    with refused(ModelError):
        continued(broken, windows(tokenizer, texts(), 8, 8))


def test_a_secret_in_a_target_is_ranked_as_it_is_trained(model: Any, tokenizer: Any) -> None:
    """Behind a space, and without its prompt."""
    template = Template("Pin of {name}:{secret}.", 1)
    (one,) = template.drawn(1, SeededEntropy(0).stream("canaries"))

    def of(secret: int) -> float:
        ids = [*tokenizer(f"Pin of {one.name}: {secret}.")["input_ids"], tokenizer.eos_token_id]
        with torch.no_grad():
            log = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(1)
        return sum(float(log[at - 1, ids[at]]) for at in range(len(ids) - 3, len(ids)))  # a digit, a point and the end

    said = np.array([of(secret) for secret in range(10)])
    found = of_targets(model, tokenizer, [template.pair(one, secret) for secret in range(10)])
    assert found == pytest.approx(said, rel=1e-4)
    (exposure,) = exposures(model, tokenizer, template, [one], prompted=True)
    assert exposure.ahead == (said > said[int(one.secret)]).sum()


def test_an_audit_that_cannot_tell_says_why() -> None:
    none, low, high = [], [1.0] * 4, [6.0] * 4
    for members, others, limit, why in (
        (high, low, 3.0, ""),
        (none, low, 3.0, "no planted secret was in the training"),
        (high, high, 3.0, "secrets that were not in the training are exposed as well"),
        (high, low, 7.0, "an exposure is at most 6.64"),
    ):
        groups = {"members": members, "others": others}
        summaries = {
            name: _of([Exposure(one, (one, one), None, 1, 99) for one in values]) for name, values in groups.items()
        }
        facts = {"space": 100, "secrets": [{"tried": 99}], **summaries}
        assert (why in untold(facts, limit)) if why else not untold(facts, limit)
        assert ("This audit is invalid" in sentences(facts)[0]) == ("as well" in why)


# Personal data.


@every(
    ("text", "items"),
    [
        (MAIL, {("e-mail", "ann.b@post.org"), ("phone", "+442079460958")}),
        ("call 555-123-4567 or (0221) 123 4567", {("phone", "5551234567"), ("phone", "02211234567")}),
        ("card 4111 1111 1111 1111, not 4111 1111 1111 1112", {("payment card", "4111111111111111")}),
        ("IBAN DE89 3704 0044 0532 0130 00.", {("IBAN", "de89370400440532013000")}),
        ("IBAN DE88 3704 0044 0532 0130 00.", set()),
        ("SSN 078-05-1120, no SSN: 666-05-1120", {("US social security", "078-05-1120".replace("-", ""))}),
        ("from 1998 to 2003, 2004, pages 100-120, 3.14159265", set()),
        ("a@b and @name", set()),
    ],
)
def test_personal_data_are_found_by_patterns(text: str, items: set[tuple[str, str]]) -> None:
    assert personal_items(text) == {Item(*one) for one in items}


# From the command line.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, model: Any, tokenizer: Any) -> Path:
    tmp = tmp_path_factory.mktemp("extraction")
    saved(model, tokenizer, tmp / "tuned")
    saved(untrained(tokenizer, 1), tokenizer, tmp / "fresh")
    (tmp / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts()))
    return tmp


def extract(place: Path, name: str, *more: Any) -> list[str]:
    lengths = ["--prefix", "8", "--suffix", "20"]
    return [*map(str, ("audit", "extract", place / name, place / "texts.jsonl", *lengths, *more))]


def test_what_came_back_stands_beside_what_comes_back_anyway(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    reference = "--reference", place / "fresh"
    call = extract(place, "tuned", *reference, "--fail-above", "extracted=0.2")
    facts = facts_of(call, capsys, 4, "above --fail-above extracted=0.2")
    own, control = facts["readers"]
    assert own["verbatim"] >= 5
    assert (control["near"], control["never_saw"]) == (0, True)
    assert facts["only_by_the_model"] == own["near"]
    assert facts["personal_in_texts"]["e-mail"] == own["personal"]["e-mail"] == 1
    assert control["personal"] == {}
    assert "written" not in facts["returned"][0], "texts are shown on request alone"
    twin = shutil.copytree(place / "tuned", tmp_path / "twin")
    both = facts_of(extract(place, "tuned", "--reference", twin), capsys)
    assert both["only_by_the_model"] == 0, "another model gives it back too"
    shown = shown_by(extract(place, "tuned", "--show-texts", "--fail-above", "extracted=1"), capsys)
    assert "ann.b@post.org" in shown
    assert "There is no reference that never saw them" in shown
    assert "1 of 1 (e-mail)" in shown


def test_the_base_of_an_adapter_is_a_control(place: Path, tmp_path: Path, capsys: Capsys, tokenizer: Any) -> None:
    from peft import LoraConfig, get_peft_model

    adapter = get_peft_model(
        untrained(tokenizer, 1), LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], init_lora_weights=False)
    )
    adapter.save_pretrained(tmp_path / "adapter")
    own, base = facts_of(extract(place, "fresh", "--adapter", str(tmp_path / "adapter")), capsys)["readers"]
    (alone,) = facts_of(extract(place, "fresh"), capsys)["readers"]
    assert (own["model"], base["model"]) == ("the model", "its base")
    assert base["expected_in_draws"] == pytest.approx(alone["expected_in_draws"], rel=1e-4, abs=0)
    assert own["expected_in_draws"] != pytest.approx(alone["expected_in_draws"], rel=0.01, abs=0)


def test_what_does_not_fit_is_one_sentence(place: Path, tmp_path: Path, capsys: Capsys) -> None:
    other = tokenizer_of(["other words entirely"])
    saved(untrained(other), other, tmp_path / "other")
    exposure = ["audit", "prepared", place / "tuned", "x", "--exposure"]
    calls = (
        extract(place, "tuned", "--prefix", "0"),
        extract(place, "tuned", "--suffix", "120"),
        extract(place, "tuned", "--fail-above", "auc=1"),
        extract(place, "tuned", "--reference", tmp_path / "other"),
        extract(place, "tuned", "--reference", "/no"),
        [*extract(place, "tuned")[:3], "/no"],
        extract(place, "nowhere"),
        [*exposure, "--reference", "gpt2"],
        [*exposure, "--labels", "a"],
        [*exposure[:-1], "--secrets-tried", "9"],
    )
    refusals("extraction", calls, capsys)


# The benchmark.


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def of_benchmark(target: float | None, seed: int, bits: float) -> dict[str, Any]:
    """Two clients of two canaries: one copy of each at the first, four at the second."""
    rounds = [{"round": 0, "perplexity": None, "exposures": [1.0] * 4}]
    rounds.append({"round": 3, "perplexity": 50.0, "exposures": [bits, bits, bits + 1, bits + 3]})
    return {"target": target, "seed": seed, "rounds": rounds}


def test_the_table_has_a_row_for_each_level_of_privacy() -> None:
    report = runpy.run_path(str(BENCHMARKS / "exposure_report.py"))
    runs = [
        of_benchmark(8.0, 0, 1.0),
        of_benchmark(None, 0, 3.0),
        of_benchmark(1.0, 0, 0.5),
        of_benchmark(None, 1, 4.0),
    ]
    lines = report["table"](runs, (1, 4), 2).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["without privacy", "epsilon 8", "epsilon 1"]
    cells = [cell.strip() for cell in lines[2].split("|")[2:-1]]
    assert cells[:4] == ["2", "3.50 ± 0.71", "5.50 ± 0.71", "4.50 ± 0.71"]
    assert float(cells[4]) < 1e-3 < float(lines[4].split("|")[6])
    assert len(report["drawn"](runs, (1, 4), 2).axes) == 2


@pytest.mark.nightly
def test_a_short_run_is_whole_and_is_not_made_again(tmp_path: Path) -> None:
    said = notes.generate(3000, seed=0, split="train").text
    rows = [{"text": " ".join(said[at : at + 3]), "book": at % 4} for at in range(0, 3000, 3)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "runs.jsonl"
    command = [sys.executable, str(BENCHMARKS / "exposure.py"), str(tmp_path), *("--quick", "--seeds", "1", "--out")]
    for _ in range(2):
        done = subprocess.run([*command, str(out)], capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr
        assert "| epsilon 1 | 1 |" in done.stdout
    runs = [json.loads(line) for line in out.read_text().splitlines()]
    assert [run["target"] for run in runs] == [None, 8.0, 1.0]
    assert [run["epsilon"] is None for run in runs] == [True, False, False]
    assert all(0.9 * run["target"] < run["epsilon"] <= run["target"] for run in runs[1:])
    assert all([len(one["exposures"]) for one in run["rounds"]] == [16, 16] for run in runs)
