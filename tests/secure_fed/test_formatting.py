"""How the report formats numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from secure_fed.report import formatting as words

SAID: dict[Callable[[Any], str], dict[float | None, str]] = {
    words.number: {None: "–", math.nan: "not finite", 0.8714: "0.871", 12_345: "12,345"},
    words.at_most: {7.961: "7.97", 7.97: "7.97", 8.0: "8", 0.1: "0.1", 15_737.7: "15,800", math.inf: "not finite"},
    words.percent: {0.8714: "87.1 %", None: "–"},
    words.rate: {0.0003: "0.0003", math.inf: "not finite"},
    words.size: {0: "0 bytes", 999: "999 bytes", 1000: "1.00 kB", 999_999: "1.00 MB", 9_996: "10.0 kB", None: "–"}
    | {14_814_804: "14.8 MB", 123_456_789: "123 MB", 5e18: "5,000 PB"},
    words.duration: {
        0.04: "0.0 s",
        9.96: "10 s",
        59.7: "1 min 0 s",
        135: "2 min 15 s",
        108_060: "30 h 1 min",
        None: "–",
    },
}


def test_numbers_read_well() -> None:
    for say, said in SAID.items():
        assert {value: say(value) for value in said} == said


def test_a_count_has_its_noun_and_a_list_its_and() -> None:
    assert words.counted(1, "class", "classes") == "1 class"
    assert words.counted(1200, "client") == "1,200 clients"
    listed = [words.listed(names) for names in ([], ["a"], ["a", "b"], ["a", "b", "c"])]
    assert listed == ["", "a", "a and b", "a, b and c"]
