"""Texts that people read, kept as files: `python -m pytest --rewrite-golden TESTS` writes those of the chosen tests anew.

A test states what is refused by its type and its setting; the sentence is in `tests/golden/`, in a file for each test file.
`golden` compares a longer text, such as a command's help, with a file of its own. To change a wording, change the program,
rewrite, and read the difference.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parent / "golden"
REWRITE = "SECURE_FED_REWRITE_GOLDEN"  # the environment's variable that `--rewrite-golden` sets
_ROOT = Path(__file__).resolve().parents[1]
_TEMPORARY = re.compile(r"/\S*?pytest-of-[^/\s]+/pytest-\d+(?:/popen-gw\d+)?/[^/\s\"'`,;:)]+|/tmp/tmp\w+")
_seen: Counter[str] = Counter()  # the sentences of each test so far


@contextmanager
def refused(
    kind: type[BaseException], setting: str | None = None, *, hide: str | None = None, worded: bool = True
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """`pytest.raises(kind)`, about this setting, in the words that are kept.

    setting: what `error.setting` has to be; None where the error is about no setting, or has no such attribute. hide: a
    pattern of what differs from run to run, such as a digest. worded: False where the whole sentence does.
    """
    with pytest.raises(kind) as caught:
        yield caught
    if setting is not None:
        assert caught.value.setting == setting, f"about {caught.value.setting!r}: {caught.value}"
    if worded:
        _compare_sentence(str(caught.value), hide)


def said(sentence: str, *, hide: str | None = None) -> None:
    """Assert that the sentence is the next one kept for this test: of a refusal that comes as no exception."""
    _compare_sentence(sentence, hide)


def golden(name: str, text: str, *, hide: str | None = None) -> None:
    """Assert that the text is that of the file `tests/golden/NAME`."""
    file, found = FOLDER / name, _without_paths(text, hide)
    if os.environ.get(REWRITE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(found, encoding="utf-8")
    assert file.exists(), _how(file)
    assert found == file.read_text(encoding="utf-8"), _how(file)


def sentences(file: Path) -> dict[str, list[str]]:
    """The kept sentences of a test file's tests, by the name of the test."""
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def _compare_sentence(sentence: str, hide: str | None) -> None:
    path, test = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)[0].split("::", 1)
    file = (FOLDER / Path(path).relative_to("tests")).with_suffix(".json")
    at, found, kept = _seen[f"{path}::{test}"], _without_paths(sentence, hide), sentences(file)
    _seen[f"{path}::{test}"] += 1
    own = kept.get(test, [])
    if os.environ.get(REWRITE) and own[at : at + 1] != [found]:
        own = kept[test] = [*own[:at], found]
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(dict(sorted(kept.items())), indent=1, ensure_ascii=False)
        file.write_text(text + "\n", encoding="utf-8")
    assert at < len(own), _how(file)
    assert found == own[at], _how(file)


def _without_paths(text: str, hide: str | None) -> str:
    text = _TEMPORARY.sub("TMP", text).replace(str(_ROOT), "REPO")
    return re.sub(hide, "…", text) if hide else text


def _how(file: Path) -> str:
    return f"{file.relative_to(_ROOT)} has other words, or none: `pytest --rewrite-golden` writes them anew"
