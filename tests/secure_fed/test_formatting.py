"""How the report formats numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

from secure_fed.report import formatting as words
from tests.cells import every


@every(
    ("say", "value", "said"),
    [
        (words.number, None, "–"),
        (words.number, math.nan, "not finite"),
        (words.number, 0.8714, "0.871"),
        (words.number, 12_345, "12,345"),
        (words.at_most, 7.961, "7.97"),
        (words.at_most, 7.97, "7.97"),
        (words.at_most, 8.0, "8"),
        (words.at_most, 0.1, "0.1"),
        (words.at_most, 15_737.7, "15,800"),
        (words.at_most, math.inf, "not finite"),
        (words.percent, 0.8714, "87.1 %"),
        (words.percent, None, "–"),
        (words.rate, 0.0003, "0.0003"),
        (words.rate, math.inf, "not finite"),
        (words.size, 0, "0 bytes"),
        (words.size, 999, "999 bytes"),
        (words.size, 1000, "1.00 kB"),
        (words.size, 999_999, "1.00 MB"),
        (words.size, 9_996, "10.0 kB"),
        (words.size, 14_814_804, "14.8 MB"),
        (words.size, 123_456_789, "123 MB"),
        (words.size, 5e18, "5,000 PB"),
        (words.size, None, "–"),
        (words.duration, 0.04, "0.0 s"),
        (words.duration, 9.96, "10 s"),
        (words.duration, 59.7, "1 min 0 s"),
        (words.duration, 135, "2 min 15 s"),
        (words.duration, 3600 * 30 + 60, "30 h 1 min"),
        (words.duration, None, "–"),
    ],
)
def test_numbers_read_well(say: Callable[[float | None], str], value: float | None, said: str) -> None:
    assert say(value) == said


def test_a_count_has_its_noun_and_a_list_its_and() -> None:
    assert words.counted(1, "class", "classes") == "1 class"
    assert words.counted(1200, "client") == "1,200 clients"
    assert [words.listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])] == [
        "",
        "a",
        "a and b",
        "a, b and c",
    ]
