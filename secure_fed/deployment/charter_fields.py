"""The fields of a charter, read and checked: names, labels, lists and keys. A ValueError says what is wrong with one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

LONGEST_NAME = 48  # below the length of a fingerprint, so that no name can contain a forged one
LONGEST_CLASS = 1000  # characters of the name of a class


def shown_name(value: Any) -> str:
    """A name that people read beside a fingerprint. ValueError if it could be mistaken for other lines or another name."""
    fits = isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()
    if not fits or value != " ".join(value.split()):
        raise ValueError(
            f"{value!r:.60} is no name of one printable line of 1 to {LONGEST_NAME} characters with single spaces between words"
        )
    return str(value)


def text_of(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > LONGEST_CLASS:
        raise ValueError(f"{value!r:.40} is no name")
    return value


def label_of(value: Any) -> int | str:
    if type(value) not in (int, str):
        raise ValueError(f"{value!r:.40} is no label")
    return value  # type: ignore[no-any-return]


def list_of(value: Any) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is no list")
    return value


def key_of(value: Any) -> bytes:
    key = bytes.fromhex(value)
    if len(key) != 32:
        raise ValueError(f"a public key has 32 bytes, and this one {len(key)}")
    return key
