"""The kept sentences belong to tests that exist, and the helpers that compare them can fail."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from secure_fed.errors import ConfigError
from tests.golden import FOLDER, REWRITE, golden, refused, sentences


def test_every_kept_sentence_belongs_to_a_test() -> None:
    for file in FOLDER.rglob("*.json"):
        tests = Path("tests") / file.relative_to(FOLDER).with_suffix(".py")
        assert tests.exists(), file
        functions = set(re.findall(r"def (test_\w+)", tests.read_text(encoding="utf-8")))
        assert {name.split("::")[-1].split("[")[0] for name in sentences(file)} <= functions, file


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A folder of sentences of its own: nothing here is rewritten."""
    monkeypatch.delenv(REWRITE, raising=False)
    monkeypatch.setattr("tests.golden.FOLDER", tmp_path / "tests" / "golden")
    monkeypatch.setattr("tests.golden._ROOT", tmp_path)


@pytest.mark.usefixtures("kept")
def test_a_change_of_words_fails_and_rewriting_keeps_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sentence: str) -> None:
        monkeypatch.setattr("tests.golden._seen", Counter())
        with refused(ConfigError, "privacy.epsilon"):
            raise ConfigError(sentence).about("privacy.epsilon", 0, "above 0")

    with pytest.raises(AssertionError, match="--rewrite-golden"):
        refuse("one sentence")
    monkeypatch.setenv(REWRITE, "1")
    refuse("one sentence")
    monkeypatch.delenv(REWRITE)
    refuse("one sentence")
    with pytest.raises(AssertionError, match="--rewrite-golden"):
        refuse("another sentence")


@pytest.mark.usefixtures("kept")
def test_another_setting_fails() -> None:
    with pytest.raises(AssertionError, match=r"privacy\.delta"), refused(ConfigError, "privacy.epsilon", worded=False):
        raise ConfigError("one sentence").about("privacy.delta", 0, "above 0")


@pytest.mark.usefixtures("kept")
def test_a_longer_text_is_compared_without_the_paths_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(REWRITE, "1")
    golden("help.txt", f"see {tmp_path}/page.html\n")
    monkeypatch.delenv(REWRITE)
    golden("help.txt", "see /tmp/pytest-of-me/pytest-9/another0/page.html\n")
    with pytest.raises(AssertionError):
        golden("help.txt", "see nothing\n")
    with pytest.raises(AssertionError):
        golden("missing.txt", "see nothing\n")
