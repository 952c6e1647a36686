"""Privacy of examples and of persons: each client counts its own steps, and the largest epsilon is reported."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy import accounting
from privacy.entropy import SeededEntropy
from privacy.sampling_and_turns import Poisson
from secure_fed.errors import DataError
from secure_fed.federation import Federation
from secure_fed.rounds.transport import Recording
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import EXAMPLE, federation

SIZES = (8, 40, 200)  # with batches of 4: rates 1/2, 1/10, 1/50, and 2, 10, 50 steps an epoch
STEPS = (2, 10, 50)
Z = {**EXAMPLE, "privacy.noise_multiplier": 1.0, "training.steps": 2}


def naive(z: float, counts: dict[str, int], sizes: tuple[int, ...] = SIZES, delta: float = 1e-3) -> dict[str, float]:
    """Every client's epsilon after its `counts` of steps, computed one client at a time."""
    return {
        name: accounting.epsilon(Poisson(size, min(1.0, 4 / size)).release(z), count, delta)
        for size, (name, count) in zip(sizes, sorted(counts.items()), strict=True)
    }


# Examples.


@pytest.mark.slow
def test_epsilon_is_that_of_the_worst_client_and_just_below_the_target(tmp_path: Path) -> None:
    settings = {**EXAMPLE, "privacy.epsilon": 3.0, "training.steps": None, "federation.rounds": 2}
    built = federation({**settings, "evaluation.audit_fraction": 0.0}, sizes=SIZES)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    said = built.run(tmp_path / "run").summary
    ledger = private_toys.own_ledger(tmp_path / "run")
    assert private_toys.charges(ledger) == [(f"client-{i}", STEPS[i]) for _ in range(2) for i in range(3)]
    charged = ledger.charged(ledger.rows()[1].run)
    epsilons = naive(said["noise_multiplier"], charged)
    assert said["epsilon"] == said["epsilon_participants"] == max(epsilons.values())
    assert 0.99 * 3 < said["epsilon"] <= 3
    assert said["epsilon_cumulative"] == said["epsilon"]
    assert max(epsilons, key=lambda name: epsilons[name]) == "client-0", "the smallest has the largest batches"
    assert said["sampling_rate"] == 0.5
    assert said["unit"] == "example"
    assert "one example" in said["privacy"]["adjacency"]
    assert "NOT PRIVATE" not in said["privacy_statement"]
    assert all(math.isnan(reply.loss) and reply.weight == 1.0 for _, reply in recording.exchanges)
    assert said["ended_early"] is None


@pytest.mark.parametrize("method", chosen(toys.METHODS, ["fra_lora"]))
def test_every_method_trains_privately(method: str) -> None:
    settings = {**Z, "method.name": method, "federation.rounds": 2}
    if method == "fra_then_ffa":
        settings["method.switch_round"] = 1
    seeded = [federation(settings, 4).run() for _ in range(2)]
    assert toys.same(seeded[0].state.tensors, seeded[1].state.tensors)
    assert toys.without_time(seeded[0].records) == toys.without_time(seeded[1].records)
    assert seeded[0].summary["privacy_statement"].startswith("NOT PRIVATE")
    other = federation(settings).run()
    assert not toys.same(seeded[0].state.tensors, other.state.tensors)
    assert other.summary["releases"] == 4
    assert {record["train_loss"] for record in other.records} == {None}


def spent(built: Federation, path: Path) -> tuple[Result, list[list[float]], list[tuple[str, int]]]:
    """Runs the federation: (its result, the weights of each round's replies, the ledger's charges)."""
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run(path)
    weights = [
        [reply.weight for request, reply in recording.exchanges if request.round == round_]
        for round_ in range(len(result.records))
    ]
    return result, weights, private_toys.charges(private_toys.own_ledger(path))


def test_a_client_whose_share_is_spent_sits_out(tmp_path: Path) -> None:
    built = federation({**Z, "privacy.participations": 2, "federation.rounds": 4})
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result, weights, charges = spent(built, tmp_path / "run")
    assert weights == [[1.0] * 3, [1.0] * 3, [0.0] * 3, [0.0] * 3]
    assert charges == [(f"client-{i}", 2) for _ in range(2) for i in range(3)]
    late = [reply.contribution for request, reply in recording.exchanges if request.round >= 2]
    assert [contribution.norm() for contribution in late] == [0.0] * 6
    assert result.summary["releases"] == 4
    assert result.summary["privacy"]["participations"] == 2


@pytest.mark.slow
def test_a_budget_that_ends_within_a_round_stops_a_client_there(tmp_path: Path) -> None:
    """The budget allows three steps and a round has two: the client takes part in one round and in half of the next."""
    release = Poisson(5, 0.8).release(1.0)
    limit = 0.5 * sum(accounting.epsilon(release, count, 1e-3) for count in (3, 4))
    settings = {**Z, "privacy.epsilon": limit, "privacy.on_exhausted": "stop", "federation.rounds": 4}
    built = federation(settings, 3, sizes=(5, 400, 400))
    result, weights, charges = spent(built, tmp_path / "run")
    assert [releases for who, releases in charges if who == "client-0"] == [2, 1]
    assert [releases for who, releases in charges if who == "client-1"] == [2, 2, 2, 2]
    assert [row[0] for row in weights] == [1.0, 1.0, 0.0, 0.0]
    assert [row[1] for row in weights] == [1.0] * 4
    assert result.summary["epsilon"] <= limit
    assert result.summary["epsilon"] == max(
        naive(1.0, {"client-0": 3, "client-1": 8, "client-2": 8}, (5, 400, 400)).values()
    )


def test_fewer_steps_are_fewer_steps() -> None:
    """A client that is allowed one of two steps ends with the result of a single step."""
    whole, short = federation({**Z, "training.steps": 1}, 3), federation(Z, 3)
    for built in (whole, short):
        for client in built.assembly.clients:
            client._setup = replace(client._setup, allowance=lambda who, wanted, round_: 1)
    one, other = (private_toys.one_round(built) for built in (whole, short))
    assert toys.same(one.after.tensors, other.after.tensors)


def test_personal_tensors_are_trained_privately_too(tmp_path: Path) -> None:
    settings = {**Z, "method.personal": ["classifier"], "privacy.clip_norm": 1e-6, "training.optimizer": "sgd"}
    built = federation({**settings, "privacy.noise_multiplier": 1e6, "federation.rounds": 1}, 1)
    start = built.assembly.clients[0].personal
    built.run()
    assert (built.assembly.clients[0].personal - start).norm() > 0.01, "the noise is in what never leaves, too"


# Persons.


@pytest.fixture
def persons(tmp_path: Path) -> Path:
    """Forty-eight notes of twelve patients: each has one note at each of four sites, two calm and two wild."""
    rows = [
        {
            "text": f"word{row % 40} {('calm', 'wild')[row % 2]}",
            "label": ("calm", "wild")[row % 2],
            "site": f"site-{row % 4}",
            "patient": f"patient-{row // 4}",
        }
        for row in range(48)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:8]))
    return tmp_path


def of_persons(model: Path, folder: Path, **changed: Any) -> Federation:
    settings = {
        "model.name": str(model),
        "data.train": str(folder / "train.jsonl"),
        "data.test": str(folder / "test.jsonl"),
        "data.client": "site",
        "method.modules_to_save": [],
        "federation.rounds": 1,
        "privacy.unit": "group",
        "privacy.group_column": "patient",
        "privacy.delta": 1e-3,
        "privacy.noise_multiplier": 1.0,
        **{name.replace("__", "."): value for name, value in changed.items()},
    }
    return Federation(toys.config(settings))


@pytest.mark.slow
def test_groups_are_the_units(small_model: Path, persons: Path) -> None:
    built = of_persons(small_model, persons)
    assert built.assembly.problem.units == [12, 12, 12, 12]
    assert built.assembly.problem.groups is not None
    for own, groups in zip(built.assembly.problem.train, built.assembly.problem.groups, strict=True):
        assert len(own) == len(groups) == 12
    said = built.run().summary
    assert said["unit"] == "group"
    assert said["sampling_rate"] == pytest.approx(4 / 12)
    assert said["epsilon"] == accounting.epsilon(Poisson(12, 4 / 12).release(1.0), 1, 1e-3)
    assert "all examples of one person" in said["privacy"]["unit"]
    fewer = of_persons(small_model, persons, data__client="label")
    assert fewer.assembly.problem.units == [12, 12], "twenty-four notes, two of each patient's"
    assert fewer.run().summary["sampling_rate"] == pytest.approx(4 / 12)


@pytest.mark.nightly
def test_persons_of_many_sites_train_together_as_one_site_after_the_other(small_model: Path, persons: Path) -> None:
    """The results are equal to the bit: passes, coins and noise are the same."""

    def trained(together: int) -> Tensors:
        config = of_persons(small_model, persons, training__together=together, training__batch_size=3).config
        built = Federation(config, entropy=SeededEntropy(3))
        for module in built.assembly.objective.modules():
            module.p = module.dropout_prob = 0.0  # type: ignore[assignment]  # dropout off: shared passes draw it in another order
        return built.run().state.tensors

    assert toys.same(trained(8), trained(1))


def test_a_column_of_persons_has_to_be_there(small_model: Path, persons: Path) -> None:
    with pytest.raises(DataError, match=r"no column 'person'.*privacy\.group_column|privacy\.group_column.*'person'"):
        of_persons(small_model, persons, privacy__group_column="person")
