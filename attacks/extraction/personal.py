"""Personal data in texts, by patterns: e-mail addresses, phone numbers, and numbers of documents and accounts.

Carlini et al. 2021 (section 6.4) found such data in a language model's outputs. Patterns miss much (names, addresses, other
countries' numbers) and give false matches, so a number counts as an account number only if its check digits are right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Item:
    """kind: a key of PATTERNS. value: without spaces and hyphens, in lower case, so that different spellings are equal."""

    kind: str
    value: str


def _any(value: str) -> bool:
    return True


def _plain(value: str) -> str:
    return re.sub(r"[\s().\-/]", "", value)


def _luhn(value: str) -> bool:
    """The check digit of payment cards (ISO/IEC 7812-1)."""
    doubled = [int(one) * (1 + place % 2) for place, one in enumerate(reversed(_plain(value)))]
    return sum(one - 9 * (one > 9) for one in doubled) % 10 == 0


def _iban(value: str) -> bool:
    """The check digits of account numbers (ISO 13616)."""
    moved = _plain(value)[4:] + _plain(value)[:4]
    return int("".join(str(int(one, 36)) for one in moved)) % 97 == 1


def _phone(value: str) -> bool:
    """9 to 15 digits, in international, national or North American form; years do not match."""
    begins = value[0] in "+0(" or re.fullmatch(r"\d{3}([ .-])\d{3}\1\d{4}", value)
    return bool(begins) and 9 <= len(_plain(value).lstrip("+")) <= 15


PATTERNS: dict[str, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "e-mail": (re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}\b", re.IGNORECASE), _any),
    "IBAN": (re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?\b"), _iban),
    "payment card": (re.compile(r"(?<![\d-])\d(?:[ -]?\d){12,18}(?![\d-])"), _luhn),
    "US social security": (re.compile(r"(?<![\d-])(?!000|666|9\d\d)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\d-])"), _any),
    "phone": (re.compile(r"(?<![\w.+-])(?:\+|00)?\(?\d{2,4}\)?(?:[ ./-]?\(?\d{2,4}\)?){2,4}(?![\w-])"), _phone),
}


def personal_items(text: str) -> set[Item]:
    """The items in a text. A match of one pattern is not searched by later patterns."""
    items: set[Item] = set()
    for kind, (pattern, right) in PATTERNS.items():

        def taken(match: re.Match[str], kind: str = kind, right: Callable[[str], bool] = right) -> str:
            if not right(match[0]):
                return match[0]
            items.add(Item(kind, (match[0] if kind == "e-mail" else _plain(match[0])).lower()))
            return " " * len(match[0])

        text = pattern.sub(taken, text)
    return items
