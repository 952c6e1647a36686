"""Progress of a run: it reports every stage and client, and no number that has to stay secret."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from privacy.plan import Target, for_sums
from privacy.sampling_and_turns import Poisson
from secure_fed.methods.method import State
from secure_fed.report import progress as shown
from secure_fed.report.formatting import at_most
from secure_fed.report.progress import ConsoleProgress
from secure_fed.rounds.engine import Charges
from secure_fed.rounds.transport import Progress
from secure_fed.runs.budget import RunBudget
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed.masked.wide_toys import CLIPPED, MASKED, federation


def watched(settings: dict[str, Any]) -> list[Progress]:
    built, told = federation({"federation.rounds": 2, **settings}), list[Progress]()
    built.callbacks.append(SimpleNamespace(on_progress=told.append))
    for number, record in enumerate(built.run().records):
        sent = [one.sent for one in told if one.round == number]
        assert set(sent[-2:]) <= {record["bytes_up"] + record["bytes_down"], 0}, "all bytes are told of, or none"
    return told


def stages(told: list[Progress], round_: int) -> list[str]:
    names = [one.stage for one in told if one.round == round_]
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]


@pytest.mark.parametrize("settings", [{}, {"training.together": 1}], ids=["together", "in turn"])
def test_clients_are_counted_as_they_train(settings: dict[str, Any]) -> None:
    told = [one for one in watched({"training.steps": 3, **settings}) if one.round == 1]
    assert stages(told, 1) == ["training", "testing"]
    done = [one.done for one in told if one.stage == "training"]
    assert done == sorted(done)
    assert (done[0], done[-1]) == (0, told[0].total)
    assert len({*done}) > 3 if settings else any(0 < one < told[0].total for one in done)


def test_behind_masks_every_stage_is_told() -> None:
    told = watched(MASKED)
    assert stages(told, 0) == ["exchanging keys", "sharing secrets", "training", "taking masks off", "testing"]


def test_of_a_secret_cohort_no_number_is_told() -> None:
    told = watched({**CLIPPED, "federation.sampling": "poisson", "federation.cohort": 3})
    assert {(one.done, one.total, one.sent) for one in told} == {(0.0, 0, 0)}


def ended(number: int, **more: Any) -> tuple[dict[str, Any], State]:
    return {"round": number, "bytes_up": 1000, "bytes_down": 0, "rejected": [], **more}, State(Tensors({}), number)


def test_an_accuracy_is_shown_with_the_round_that_it_is_of(capsys: pytest.CaptureFixture[str]) -> None:
    with ConsoleProgress(4) as line:
        line.begin(None)
        line.on_round_end(*ended(1))
        line.on_round_end(*ended(2, accuracy=0.5))
        line.on_round_end(*ended(3))
    first, second, third = capsys.readouterr().err.splitlines()
    assert "accuracy" not in first
    assert "accuracy 50.0%, 2.00 kB sent" in second
    assert "accuracy 50.0% after round 2, 3.00 kB sent" in third


def test_epsilon_is_of_all_charged_releases_those_of_an_interrupted_round_included(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plan = for_sums(Target(1.0, None, 1e-5), Poisson(20, 0.1), 9)
    made = itertools.count(4)  # a process before this one charged three releases
    budget = RunBudget("run", None, SimpleNamespace(charge=lambda *given: next(made)), plan)  # type: ignore[arg-type]
    with ConsoleProgress(4) as line:
        line.begin(plan, Charges(budget))
        for number in (1, 2):
            budget.charge(number - 1, "change")
            line.on_round_end(*ended(number))
    shown = [f"epsilon {at_most(plan.epsilon(releases))}, " for releases in (4, 5)]
    assert all(told in text for told, text in zip(shown, capsys.readouterr().err.splitlines(), strict=True))
    assert shown[0] != shown[1] != f"epsilon {at_most(plan.epsilon(2))}, "


def test_within_a_long_round_a_line_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(shown.time, "monotonic", lambda: now)
    with ConsoleProgress(2) as line:
        line.begin(None)
        for seconds, done in ((1, 5), (20, 10), (25, 11), (40, 20)):
            monkeypatch.setattr(shown.time, "monotonic", lambda at=now + seconds: at)
            line.on_progress(Progress(0, "training", done, 40, 500))
    assert capsys.readouterr().err.splitlines() == [
        "round 1/2: training 10/40, 500 bytes sent",  # half a round says how long the others take
        "round 1/2: training 20/40, 500 bytes sent, 0:02:00 left by the slow first round",
    ]
