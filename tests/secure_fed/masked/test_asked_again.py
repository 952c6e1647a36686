"""Clients in masked sums refuse sums that the run does not invite to, repeated requests, zeros, and more sums than reserved."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import kstest

from privacy.ledger import Ledger
from privacy.plan import realised
from protocols.errors import ProtocolError, Tampering
from protocols.masking import centred
from secure_fed.errors import SecureFedError, TrainingError
from secure_fed.rounds.masked.checks import Passes
from secure_fed.rounds.masked.client import MaskedClient
from secure_fed.rounds.transport import Recording, Stage
from tests.golden import refused
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.lying import Heard, request_of, session, watch
from tests.secure_fed.masked.wide_toys import (
    CHANCE,
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    MASKED,
    SKETCH,
    Interrupting,
    Tampered,
    federation,
    let_train,
    listen,
    one_round,
    recorder,
)

EIGHT = [3] * 8
ACTIVE = {"secure_aggregation.active": True}
AGAIN, TOO_MANY = r"round \d+ was requested again", "more than the run has reserved"


def refused_by(heard: Heard, clients: int, sentence: str) -> bool:
    """Whether that many clients refused, all at stage "mask" with Tampering and a sentence that matches."""
    told = list(heard.refused.values())
    said = [place == "mask" and error is Tampering and bool(re.search(sentence, what)) for place, error, what in told]
    return len(said) == clients and all(said)


# Repeated requests.


@pytest.mark.parametrize(
    ("settings", "upto"), [({**MASKED, **ACTIVE}, "mask"), (DISTRIBUTED, "done")], ids=["not opened", "noised"]
)
def test_a_round_is_contributed_to_once_and_no_earlier_one_after_it(settings: dict[str, Any], upto: str) -> None:
    """Otherwise two sums of one round, over all clients and over all but one, would differ by that client's contribution.

    It counts when the vector has left, whether or not the sum is opened.
    """
    built = federation(settings)
    assert not session(built, request_of(built, 3), upto=upto).refused
    seen = watch(built)
    for again in (3, 2, 0):
        assert refused_by(session(built, request_of(built, again), number=1 + again), 4, AGAIN)
    assert not seen.trained
    assert not session(built, request_of(built, 4), number=5).refused


def test_a_pass_is_contributed_to_once_and_in_its_order() -> None:
    built = federation({**MASKED, **SKETCH})
    one_round(built)
    seen = watch(built)
    for which in (0, 1):
        assert refused_by(session(built, request_of(built, 0, which), number=8 + which), 4, AGAIN)
    assert not seen.trained


def test_without_the_count_a_round_is_contributed_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Passes, "take", lambda self, request, cohort: None)
    built = federation(MASKED)
    sums = [session(built, request_of(built), number=number) for number in (0, 1)]
    assert not sums[1].refused
    assert (sums[0].machine.total() == sums[1].machine.total()).all()


# More than was reserved.


@pytest.mark.parametrize("upto", ["mask", "done"])
def test_no_more_vectors_leave_than_sums_were_reserved_opened_or_not(upto: str) -> None:
    """Clients also count sums that seem not opened: a sum may be opened without a client's answer and knowledge."""
    built = federation({**DISTRIBUTED, **ACTIVE})
    built.assembly.masks.begin(2)  # type: ignore[union-attr]
    for round_ in range(2):
        assert not session(built, request_of(built, round_), number=round_, upto=upto).refused
    seen = watch(built)
    assert refused_by(session(built, request_of(built, 2), number=2), 4, TOO_MANY)
    assert refused_by(session(built, request_of(built, 3), number=3, asked=lambda client: False), 4, TOO_MANY)
    assert not seen.trained
    assert not seen.entropy.labels


def begun(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """A list that will record each number of reserved sums that a client receives."""
    told: list[int | None] = []
    begin = MaskedClient.begin

    def noting(self: MaskedClient, releases: int | None = None) -> None:
        told.append(releases)
        begin(self, releases)

    monkeypatch.setattr(MaskedClient, "begin", noting)
    return told


def test_what_is_reserved_counts_and_not_what_was_wished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = begun(monkeypatch)
    Ledger.create(tmp_path / "l.sqlite", data_set="wards", epsilon=7.0, delta=0.01)
    ledger = {"privacy.ledger": str(tmp_path / "l.sqlite")}
    built = federation({**DISTRIBUTED, **ledger, "federation.rounds": 6, "privacy.on_exhausted": "stop"})
    said = built.run(tmp_path / "run").summary
    reserved = said["releases"]
    assert 0 < reserved < 6
    assert built.assembly.protection.plan.releases == 6  # type: ignore[union-attr]
    assert set(told) == {reserved}
    assert refused_by(session(built, request_of(built, reserved), number=99), 4, TOO_MANY)


def test_who_goes_on_brings_noise_only_for_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = begun(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        federation(HIDDEN, callbacks=[Interrupting(after=1)]).run(tmp_path / "run")
    built = federation(HIDDEN)
    said = built.run(tmp_path / "run", resume=True).summary
    assert told == [3] * 4 + [2] * 4
    assert (said["releases"], said["epsilon"]) == (3, built.assembly.protection.plan.epsilon())  # type: ignore[union-attr]
    assert refused_by(session(built, request_of(built, 3), number=99), 4, TOO_MANY)


# Requests for zeros.


KINDS = {"passive": MASKED, "active": {**MASKED, **ACTIVE}, "distributed": DISTRIBUTED, "hidden": HIDDEN}


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_is_asked_for_nothing_where_nobody_fills_up(kind: str) -> None:
    """If all clients but one sent zeros, the sum would be that client's contribution, noised or not."""
    built = federation(KINDS[kind])
    heard = session(built, request_of(built), asked=lambda client: client == 0)
    assert set(heard.refused) == {1, 2, 3}
    assert {(place, error) for place, error, _ in heard.refused.values()} == {("mask", Tampering)}
    assert heard.stage == "mask"


def test_whose_coin_does_not_land_brings_its_share_of_the_noise() -> None:
    built = federation({**HIDDEN, "privacy.noise_multiplier": 8.0}, sizes=EIGHT)
    let_train(built, ())
    seen = watch(built)
    totals = []
    for round_ in range(4):
        heard = session(built, request_of(built, round_), number=round_)
        assert not heard.refused
        totals.append(centred(heard.machine.total()))
    assert not seen.trained
    sigma = built.assembly.protection.shares.grid(len(totals[0])).sigma  # type: ignore[union-attr]
    noise = np.concatenate(totals) / sigma / math.sqrt(8)
    assert kstest(noise, "norm").pvalue > CHANCE
    deviations = (np.std(noise) - 1) * math.sqrt(2 * len(noise))
    assert abs(deviations) < 6, "the shares of half of them would be twelve off"


# One toss per sum.


def test_each_client_tosses_once_for_every_sum_and_anew() -> None:
    built = federation({**HIDDEN, **ACTIVE}, sizes=EIGHT)
    seen = watch(built)
    for round_ in range(4):
        let_train(built, range(8) if round_ in (0, 3) else ())
        assert not session(built, request_of(built, round_), number=round_).refused
        assert seen.entropy.drawn("coin") == 8 * (round_ + 1)
        assert refused_by(session(built, request_of(built, round_), number=100 + round_), 8, AGAIN)
    coins = [label for label in seen.entropy.labels if label[0] == "coin"]
    assert len(coins) == len(set(coins)) == 8 * 4
    assert seen.trained == [(round_, client) for round_ in (0, 3) for client in range(8)]


# The realised privacy.


def test_what_was_realised_counts_the_rounds_that_were_made_again(tmp_path: Path) -> None:
    settings = {**DISTRIBUTED, "secure_aggregation.dropout": 0.0, "secure_aggregation.corrupt": 0.0}

    def interrupted(client: int, stage: Stage) -> Stage:
        if stage.name == "mask":
            raise KeyboardInterrupt
        return stage

    for _ in range(3):
        built = federation(settings)
        built.assembly = replace(built.assembly, transport=Tampered(built.assembly.transport, interrupted))
        with pytest.raises(KeyboardInterrupt):
            built.run(tmp_path / "run", resume=(tmp_path / "run").exists())
    built = federation(settings)
    said = built.run(tmp_path / "run", resume=True).whole
    assert said["releases"] == 6 > said["privacy"]["planned_releases"] == 3
    told = said["privacy"]["realised"]
    assert told["noise_multiplier"] == said["noise_multiplier"], "nobody vanished, and nobody was to"
    plan: Any = built.assembly.protection.plan
    assert told["epsilon"] == said["epsilon"] == realised(plan, plan.noise_multiplier, 6, hidden=False)
    assert told["epsilon"] > realised(plan, plan.noise_multiplier, 3, hidden=False) * 1.2


TEN = [4] * 10


def _gather(built: Any, asked: list[int]) -> Any:
    """The first pass of the first round with these clients as contributors."""
    request = request_of(built)
    layout = built.assembly.server.layout(built.assembly.initial, request.pass_name)
    return built.assembly.masks.sums.gather(asked, request, layout, built.assembly.transport)


# Requests that clients refuse.


@pytest.mark.parametrize(
    ("settings", "asked"),
    [({**MASKED, **ACTIVE}, 3), (DISTRIBUTED, 3), (HIDDEN, 3), ({**MASKED, **ACTIVE, "federation.cohort": 5}, 10)],
    ids=["active", "distributed", "hidden", "more"],
)
def test_a_session_of_fewer_or_more_than_the_run_invites_is_refused(settings: dict[str, Any], asked: int) -> None:
    """A session of three of ten clients could be the victim and two colluding clients."""
    built = federation({"federation.cohort": 10, **settings}, sizes=TEN)
    heard = listen(built)
    with pytest.raises((ProtocolError, SecureFedError)):
        _gather(built, list(range(asked)))
    assert heard.replies == {}


def test_a_client_refuses_stages_of_a_sum_that_it_is_not_in_or_that_is_over() -> None:
    built = federation(MASKED)
    recording = Recording(built.assembly.transport)
    one_round(built, transport=recording)
    stages = [ask for ask, reply in recording.exchanges if reply.client == 0]
    assert [stage.name for stage in stages] == ["advertise", "share", "mask", "unmask"]
    fresh, done = (one.assembly.masks.clients[0] for one in (federation(MASKED), built))  # type: ignore[union-attr]
    for stage in stages[1:]:
        with refused(TrainingError):
            fresh.handle(stage)
        with refused(ProtocolError):
            done.handle(stage)


# What a client sends.


def test_who_makes_up_the_number_sends_zeros_under_its_masks() -> None:
    built = federation({**MASKED, **CLIPPED, "federation.cohort": 4}, sizes=TEN)
    heard = listen(built)
    gathered = _gather(built, [7])
    values = heard.values(0, "change")
    assert list(values) == [7]
    np.testing.assert_allclose(wide_toys.flat(gathered.total.total()), values[7], atol=1e-6)
    assert gathered.received == [7]
    assert gathered.spent.survivors == len(TEN), "a public number"


def test_the_sum_of_a_cohort_of_nobody_is_zero() -> None:
    built = federation({**MASKED, **CLIPPED, "federation.cohort": 4}, sizes=TEN)
    heard = listen(built)
    gathered = _gather(built, [])
    assert heard.replies == {}
    assert not wide_toys.flat(gathered.total.total()).any()
    assert gathered.total.weight == 0


def test_a_closed_sum_takes_nothing_more() -> None:
    built = federation(MASKED)
    gathered = _gather(built, [0, 1, 2, 3])
    with refused(TrainingError):
        gathered.total.add(gathered.total.total())


def test_no_two_sums_of_a_run_or_of_two_runs_are_one_session() -> None:
    sessions = []
    for _ in range(2):
        built = federation({**MASKED, **SKETCH, "federation.rounds": 2})
        recording = recorder(built)
        built.run()
        sessions += [ask.parameters.session for ask, reply in recording.exchanges if reply.client == 0]
    assert len(set(sessions)) == 2 * 2 * 2
    assert len(sessions) == 4 * 2 * 2 * 2
