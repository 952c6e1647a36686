"""The built-in notes and the built-in model.

The notes are reproducible, disjoint, noisy as stated, and not solved by counting words. The weights of builtin/tiny as shipped
are small, need no network, and their vocabulary can spell the notes.
"""

from __future__ import annotations

import re
import runpy
from collections import Counter
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForMaskedLM, AutoTokenizer

from secure_fed.errors import DataError
from secure_fed.learning.data import notes
from secure_fed.learning.data.notes import CONCLUSIONS, DRUGS, FAMILIES, SITES, Site
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.models.locate import BUILTIN
from tests.cells import every
from tests.golden import refused

RECORD = re.compile(r"MRN (\d{8}), phone (0\d{4} \d{6})")
SITE = {site.name: site for site in SITES}


@pytest.fixture(scope="module")
def train() -> Rows:
    return notes.generate(6_000, seed=3, split="train")


@pytest.fixture(scope="module")
def test() -> Rows:
    return notes.generate(2_000, seed=3, split="test")


def _said(site: Site, text: str) -> str:
    """The entry of the current visit, in lower case, without its mark."""
    for line in text.lower().removesuffix(".").split(site.separator):
        if site.mark_last and line.endswith(f" ({site.current})"):
            return line.removesuffix(f" ({site.current})")
        if not site.mark_last and line.startswith(f"{site.current}: "):
            return line.removeprefix(f"{site.current}: ")
    raise LookupError(text)


@cache
def _patterns(name: str) -> list[tuple[int, re.Pattern[str]]]:
    found = []
    for family, sentences in enumerate(SITE[name].families):
        for side, sentence in ((side, sides[side]) for sides in sentences for side in (0, 1)):
            pattern = re.escape(sentence)
            for blank, words in ((r"\{x\}", SITE[name].findings), (r"\{d\}", DRUGS)):
                pattern = pattern.replace(blank, f"(?:{'|'.join(words)})")
            found.append((2 * family + side, re.compile(pattern)))
    return found


def _rule(name: str, text: str) -> set[int]:
    """The classes that have the current visit's entry among their sentences."""
    said = _said(SITE[name], text)
    return {label for label, pattern in _patterns(name) if pattern.fullmatch(said)}


def test_the_same_call_gives_the_same_rows_and_fewer_are_the_first_of_more(train: Rows) -> None:
    again = notes.generate(300, seed=3, split="train")
    assert again == train.take(range(300))
    assert notes.generate(50, seed=4, split="train").text != again.text[:50]


def test_thousands_of_notes_of_many_sites_and_every_class(train: Rows) -> None:
    assert len(train) == 6_000
    assert train.label_names == notes.LABELS
    assert len(notes.LABELS) >= 8
    assert set(train.label) == set(range(len(notes.LABELS)))
    assert min(Counter(train.label).values()) > 0.08 * len(train)
    assert train.client is not None
    assert set(train.client) == set(notes.SITE_NAMES)
    assert len(notes.SITE_NAMES) >= 40
    assert len(set(train.text)) > 0.999 * len(train)


def test_no_text_is_in_both_train_and_test(train: Rows, test: Rows) -> None:
    public = notes.generate(2_000, seed=3, split="public")
    assert not set(train.text) & set(test.text)
    assert not set(public.text) & (set(train.text) | set(test.text))


@pytest.mark.parametrize("split", ["train", "test"])
def test_a_rule_that_reads_the_entry_is_right_but_for_the_stated_noise(split: str) -> None:
    rows = notes.generate(300, seed=11, split=split)
    assert rows.client is not None
    found = [_rule(name, text) for name, text in zip(rows.client, rows.text, strict=True)]
    assert all(len(classes) == 1 for classes in found)
    wrong = sum(label not in classes for label, classes in zip(rows.label, found, strict=True))
    # Three standard deviations of a share of 300 rows.
    assert abs(wrong / 300 - notes.LABEL_NOISE) < 3 * (notes.LABEL_NOISE / 300) ** 0.5


def test_identifying_strings_are_rare_and_each_is_of_one_note(train: Rows, test: Rows) -> None:
    found = [RECORD.search(text) for text in (*train.text, *test.text)]
    held = [match for match in found if match]
    share = len(held) / len(found)
    assert 0.5 * notes.IDENTIFIED < share < 1.5 * notes.IDENTIFIED
    assert len({match[1] for match in held}) == len(held)
    public = notes.generate(1_000, seed=3, split="public")
    assert not any("MRN" in text or "phone " in text for text in public.text)


def test_public_notes_conclude_in_words_and_private_ones_never(train: Rows) -> None:
    said = re.compile(r"\b(" + "|".join(word for pair in CONCLUSIONS for word in pair) + r")\b", re.IGNORECASE)
    public = notes.generate(1_000, seed=3, split="public")
    assert set(public.label) == {0}
    assert sum(bool(said.search(text)) for text in public.text) > 400
    assert not any(said.search(text) for text in train.text)


def test_the_two_sentences_of_a_pair_hold_the_same_words() -> None:
    for family in FAMILIES:
        for first, second in family:
            assert sorted(first.split()) == sorted(second.split())
            assert first != second


def test_counting_words_leaves_most_of_the_task_unsolved(train: Rows, test: Rows) -> None:
    counts = TfidfVectorizer(min_df=3)
    model = LogisticRegression(max_iter=200).fit(counts.fit_transform(train.text), train.label)
    assert model.score(counts.transform(test.text), test.label) < 0.35


def test_sites_differ_in_their_words_and_their_mix_of_classes(train: Rows) -> None:
    assert train.client is not None
    shares = {}
    for name in notes.SITE_NAMES[:6]:
        labels = [label for label, client in zip(train.label, train.client, strict=True) if client == name]
        shares[name] = Counter(labels)[0] / len(labels)
    assert max(shares.values()) > 1.3 * min(shares.values())
    assert len({(site.findings, site.families, site.current) for site in SITES}) == len(SITES)


@every(("count", "seed", "split"), [(10, 0, "validation"), (0, 0, "train"), (10, -1, "train")])
def test_what_cannot_be_drawn_is_said_in_one_sentence(count: int, seed: int, split: str) -> None:
    with refused(DataError):
        notes.generate(count, seed=seed, split=split)


TINY = BUILTIN["builtin/tiny"]
pretrain = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "pretrain.py")))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("loading reached for the network"))


def test_the_folder_holds_what_is_needed_and_at_most_8_mb() -> None:
    names = {path.name for path in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"} <= names
    assert (TINY / "model.safetensors").stat().st_size <= 8_000_000
    made_by = f"python benchmarks/pretrain.py OUT --steps {pretrain.STEPS} --seed 0 --threads 1"
    assert made_by in (TINY / "README.md").read_text(encoding="utf-8")


def test_the_vocabulary_spells_private_notes_names_and_numbers_included() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert len(tokenizer) <= 1_500
    texts = list(notes.generate(600, seed=5, split="train").text)
    encoded = tokenizer(texts)["input_ids"]
    tokens = [token for ids in encoded for token in ids]
    assert tokens.count(tokenizer.unk_token_id) == 0
    assert max(map(len, encoded)) <= tokenizer.model_max_length == pretrain.MAX_POSITIONS
    words = sum(len(text.split()) for text in texts)
    assert len(tokens) < 2 * words  # most words are one token; the rest is punctuation, [CLS], [SEP] and names


def test_it_concludes_public_notes_it_has_not_read() -> None:
    model, tokenizer = AutoModelForMaskedLM.from_pretrained(TINY).eval(), AutoTokenizer.from_pretrained(TINY)
    texts = list(notes.generate(60, seed=97, split="public").text)
    classes = pretrain.concluding(tokenizer)
    share = np.where(classes >= 0, 1.0, 0.0)
    batch = pretrain.masked(tokenizer(texts)["input_ids"], share, tokenizer.mask_token_id, np.random.default_rng(0))
    titles, within = pretrain.conclusions_right(model, batch, classes)
    assert titles > 0.9
    assert within > 0.9


@pytest.mark.nightly
def test_the_script_that_makes_it_gives_the_same_tensors_and_tokens_again() -> None:
    (first, tokens, _), (second, again, _) = (pretrain.pretrain(2, seed=1) for _ in range(2))
    assert tokens.get_vocab() == again.get_vocab()
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    other, _, _ = pretrain.pretrain(2, seed=2)
    assert not torch.equal(
        other.state_dict()["bert.encoder.layer.0.attention.self.query.weight"],
        first.state_dict()["bert.encoder.layer.0.attention.self.query.weight"],
    )
