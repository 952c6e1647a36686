"""A hidden cohort: every client takes part in every round, and only the client itself knows whether it trained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from privacy import distributed
from secure_fed.errors import ConfigError
from secure_fed.rounds.transport import Recording
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    CHANCE,
    HIDDEN,
    SKETCH,
    WAYS,
    federation,
    let_train,
    listen,
    one_round,
    recorder,
)

EIGHT = [4] * 8


def test_every_client_tosses_a_coin_of_its_own_in_every_round() -> None:
    built = federation({**HIDDEN, "federation.rounds": 24}, sizes=EIGHT)
    heard = listen(built)
    recording = recorder(built)
    result = built.run()
    trained = np.zeros((24, 8), bool)
    for (round_, _), replies in heard.replies.items():
        trained[round_, list(replies)] = True
    assert binomtest(int(trained.sum()), trained.size, 3 / 8).pvalue > CHANCE
    for wrong in (0.1, 0.75):  # wrong rates, which data of the true rate fit once in a billion times
        assert binomtest(int(trained.sum()), trained.size, wrong).pvalue < 1e-2
    assert len({row.tobytes() for row in trained}) > 12, "cohorts differ from round to round"
    assert len({column.tobytes() for column in trained.T}) > 4, "and clients from each other"
    asked = {(ask.round, ask.name, reply.client) for ask, reply in recording.exchanges}
    assert asked == {(r, n, c) for r in range(24) for n in ("advertise", "share", "mask", "unmask") for c in range(8)}
    assert {record["cohort"] for record in result.records} == {8}


def test_coins_are_secret_and_new_in_every_run() -> None:
    def trained() -> list[tuple[int, ...]]:
        built = federation(HIDDEN, sizes=EIGHT)
        heard = listen(built)
        return [(one_round(built, round_), tuple(heard.replies.get((round_, "change"), ())))[1] for round_ in range(4)]

    assert trained() != trained(), "32 coins that come out as before: less than once in ten million"


def test_two_passes_over_one_hidden_coin_are_refused() -> None:
    for settings in (SKETCH, {**SKETCH, "method.name": "fra_then_ffa"}):
        with refused(ConfigError, "privacy.hidden_cohort"):
            federation({**HIDDEN, **settings}, sizes=EIGHT)


def _told(built: Any, trained: set[int]) -> tuple[Any, Any]:
    """A round in which exactly these clients train: its record, and the sizes and types of all messages."""
    let_train(built, trained)
    recording = Recording(built.assembly.transport)
    heard = listen(built)
    seen = one_round(built, transport=recording)
    assert {client for replies in heard.replies.values() for client in replies} == trained
    passed = [
        (ask.round, ask.name, len(ask.message), type(ask.request), reply.client, type(reply), len(reply.message))
        for ask, reply in recording.exchanges
    ]
    return wide_toys.without_time([seen.record]), passed


@pytest.mark.parametrize("way", chosen(["fedlora", "ffa_lora", "fra_lora"], ["fra_lora"]))
def test_neither_records_nor_what_passes_tell_who_trained(way: str) -> None:
    told = [
        _told(federation({**HIDDEN, **WAYS[way]}, sizes=EIGHT), trained)
        for trained in ({0, 1, 2}, {5}, set(), set(range(8)))
    ]
    assert all(one == told[0] for one in told)


def test_the_mean_is_over_the_expected_number_whoever_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "discrete_gaussian", lambda sigma, count, stream: np.zeros(count, np.int64))
    for trained in ({0}, {0, 1, 2, 3, 4}):
        built = federation(HIDDEN, sizes=EIGHT)
        let_train(built, trained)
        heard = listen(built)
        seen = one_round(built)
        total = sum(heard.values(0, "change").values())
        np.testing.assert_allclose(seen.means["change"], total / 3, atol=1e-5)


def test_both_epsilons_are_one_and_the_statement_says_why() -> None:
    said = federation({**HIDDEN, "federation.rounds": 2}, sizes=EIGHT).run().summary
    assert said["epsilon"] == said["epsilon_participants"]
    assert said["sampling_rate"] == 3 / 8
    assert "every client takes part in every round" in said["privacy"]["sampling"]
    seen = federation({**HIDDEN, "privacy.hidden_cohort": False, "federation.rounds": 2}, sizes=EIGHT)
    assert seen.assembly.protection.plan.epsilon() > 1.5 * said["epsilon"]  # type: ignore[union-attr]
    assert said["cohort"] == 3
    assert said["secure_aggregation"]["clients"] == 8


def test_who_vanishes_is_not_who_did_not_train() -> None:
    """The number of survivors, and so whether a round aborts, does not depend on the coins."""
    for trained in ((), range(8)):
        built = federation({**HIDDEN, "secure_aggregation.dropout": 0.25}, sizes=EIGHT)
        let_train(built, trained)
        lost = wide_toys.Losing(built.assembly.transport, {0: "mask", 5: "share"})
        assert one_round(built, transport=lost).record["masked"]["survivors"] == 6


def test_what_everybody_sends_is_told_before_the_start_and_holds() -> None:
    settings = {**HIDDEN, "federation.rounds": 2, "evaluation.dummies": 0}
    built = federation(settings, sizes=EIGHT)
    (told,) = built.notes
    (record, other) = built.run().records
    each, back = (record[name] / 8 / 1e6 for name in ("bytes_up", "bytes_down"))
    whole = 2 * (record["bytes_up"] + record["bytes_down"]) / 1e6
    assert other["bytes_up"] == record["bytes_up"]
    assert f"each of the 8 clients sends {each:.3g} MB and receives {back:.3g} MB in every round" in told
    assert f"which makes {whole:.3g} MB for all clients over the whole run" in told
    assert federation({**settings, "privacy.hidden_cohort": False}, sizes=EIGHT).notes == []
