"""A private `secure-fed train`, killed as a process: every release was charged."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from privacy import accounting
from secure_fed.commands import cli
from secure_fed.runs.store import read_records
from tests.secure_fed import private_toys
from tests.secure_fed.test_reliability import _kill_when


@pytest.mark.nightly
def test_real_kills(small_model: Path, small_data: Path, tmp_path: Path) -> None:
    """`train`, killed during start-up and at random instants, and resumed each time: every release was charged."""
    settings = tmp_path / "run.toml"
    settings.write_text(
        f"""
        [model]
        name = '{small_model.as_posix()}'
        [data]
        train = '{(small_data / "train.jsonl").as_posix()}'
        test = '{(small_data / "test.jsonl").as_posix()}'
        client = 'site'
        [federation]
        rounds = 40
        cohort = 3
        sampling = 'poisson'
        [training]
        batch_size = 4
        [privacy]
        unit = 'client'
        noise_multiplier = 1.5
        delta = 1e-3
        ledger = '{(tmp_path / "sites.sqlite").as_posix()}'
        """
    )
    rng = random.Random(11)
    victim, ledger = tmp_path / "victim", tmp_path / "sites.sqlite"
    private_toys.Ledger.create(ledger, data_set="sites", epsilon=1000.0, delta=0.1)
    _kill_when(["train", str(settings), "--out", str(victim)], "secure-fed: ", 0.0)
    for number in range(4):
        round_ = len(read_records(victim)) + rng.randint(2, 6)  # on a loaded machine the last kill may have been late
        command = ["train", str(settings)] if number == 0 else ["train"]
        _kill_when([*command, "--resume", "--out", str(victim)], f"round {round_}/", rng.uniform(0.0, 0.05))
        assert len(private_toys.charges(ledger)) >= len(read_records(victim))
    assert 5 <= len(read_records(victim)) < 40
    assert cli.main(["train", "--resume", "--out", str(victim)]) == 0
    said = json.loads((victim / "result.json").read_text())
    opened = private_toys.Ledger.open(ledger)
    assert said["rounds"] == 40 <= said["releases"] == len(private_toys.charges(opened)) <= 40 + 5
    assert len({row.run for row in opened.rows() if row.kind == "reserve"}) == 1, "it is one run all along"
    cost = accounting.epsilon(accounting.poisson_sampled(0.5, 1.5), said["releases"], 1e-3)
    assert said["epsilon"] == said["epsilon_cumulative"] == cost
