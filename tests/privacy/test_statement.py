"""The privacy statement: its text has everything a reader needs to question it, and promises no more than its data."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from privacy.statement import CLIENTS, EVERYBODY, NOT_COVERED, Statement
from tests.cells import every

STATEMENT = Statement(
    unit="one client",
    adjacency="one client more or less",
    epsilon=2.5,
    epsilon_participants=13.25,
    delta=1e-5,
    mechanism="Gaussian with noise multiplier 0.89",
    sampling="secret coins of rate 0.1",
    accountant="privacy loss distributions",
    noise="by the server",
    trust="the server is trusted",
    released="5 noised sums",
)


@every(
    "name", [field.name for field in fields(Statement) if field.name not in ("private", "holds_against", "not_covered")]
)
def test_every_field_is_in_the_text(name: str) -> None:
    value = getattr(STATEMENT, name)
    assert {"epsilon": "(2.5, ", "epsilon_participants": "epsilon is 13.25.", "delta": "1e-05"}.get(
        name, value
    ) in STATEMENT.text
    other = 77.0 if isinstance(value, float) else "something else"
    assert str(other).removesuffix(".0") in replace(STATEMENT, **{name: other}).text


def test_what_is_not_covered_is_there_without_being_asked_for() -> None:
    assert STATEMENT.not_covered == NOT_COVERED
    assert any("hyper-parameters" in words for words in NOT_COVERED)
    assert any("evaluation" in words for words in NOT_COVERED)
    more = replace(STATEMENT, not_covered=(*NOT_COVERED, "the weather"))
    assert all(words in more.text for words in (*NOT_COVERED, "the weather"))


def test_a_statement_is_plain_data_that_json_keeps() -> None:
    assert STATEMENT.private
    assert replace(STATEMENT, private=False).text.startswith("NOT PRIVATE")
    assert not {"NOT PRIVATE", "\n"} & set(re.findall("NOT PRIVATE|\n", STATEMENT.text)), "one paragraph"
    stored = json.loads(json.dumps(STATEMENT.to_dict()))
    again = {name: tuple(value) if isinstance(value, list) else value for name, value in stored.items()}
    assert Statement(**again) == STATEMENT


def test_one_epsilon_is_said_where_one_holds_and_against_whom() -> None:
    assert "privacy against whoever gets the final model, or the model of any round. Unit: " in STATEMENT.text
    for those in (CLIENTS, EVERYBODY):
        text = replace(STATEMENT, epsilon_participants=2.5, holds_against=those).text
        assert "(2.5, 1e-05)-differential privacy against whoever gets the final model" in text
        assert "the other clients" in text
        assert text.count("epsilon") == 0
        assert ("and the server. Unit" in text) == (those == EVERYBODY)
        assert ("not against the server. Unit" in text) == (those == CLIENTS)


POSITIVE = st.floats(min_value=1e-12, max_value=1e6)


def printed(text: str) -> list[float]:
    """epsilon, delta and epsilon_participants, parsed from the text."""
    found = re.search(r"\((\S+), (\S+)\)-differential privacy.*epsilon is (\S+)\. Mech", text)
    assert found is not None
    return [float(number) for number in found.groups()]


@given(POSITIVE, POSITIVE, st.floats(min_value=1e-12, max_value=0.1))
def test_what_is_printed_is_never_less_than_what_is_guaranteed(
    epsilon: float, participants: float, delta: float
) -> None:
    text = replace(STATEMENT, epsilon=epsilon, epsilon_participants=participants, delta=delta).text
    for shown, true, digits in zip(printed(text), (epsilon, delta, participants), (4, 3, 4), strict=True):
        assert shown >= true
        assert shown <= true * (1 + 10.0 ** (1 - digits)) * (1 + 1e-12)
        assert len(Decimal(repr(shown)).normalize().as_tuple().digits) <= digits
