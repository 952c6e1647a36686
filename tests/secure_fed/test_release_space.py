"""How many numbers each method releases, counted by hand, and the noise mechanism that suits each."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.forecast import Possible, Setting, recommended
from privacy.plan import Target
from secure_fed.commands import budget_methods
from secure_fed.commands.budget_methods import spaces
from secure_fed.commands.budget_plan import show_methods
from secure_fed.config import RunConfig
from secure_fed.learning.tasks import TASKS
from secure_fed.methods import METHODS, catalogue
from secure_fed.report.terminal import PlainConsole
from tests.secure_fed.methods.test_catalogue import DEBERTA, decoder, described

SETTING = Setting(clients=5000, cohort=250, rounds=20, delta=1e-5)


def test_release_spaces_are_counted_on_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers with adapters on two matrices of 64 x 64 each; a head of 64 x 2 and a pooler of 64 x 64, with biases."""
    names = ("ffa_lora", "rolora", "fra_lora", "fra_then_ffa", "prefix_tuning")
    monkeypatch.setattr(catalogue, "METHODS", {name: METHODS[name] for name in names})
    wide = {**DEBERTA, "hidden_size": 64, "pooler_hidden_size": 64}
    target = Target(8.0, None, 1e-5)
    rows = list(spaces(described(tmp_path / "model", wide), "model", SETTING, target, Possible()))
    found = {row.method: row for row in rows}
    assert set(found) == {"ffa_lora", "rolora", "fra_lora", "fra_then_ffa"}, (
        "there are no prefixes here, and sketches are wider than 64"
    )
    head = 64 * 2 + 2 + 64 * 64 + 64
    pooled = spaces(str(tmp_path / "model"), "mean", SETTING, target, Possible())
    assert {row.numbers - found[row.method].numbers for row in pooled} == {64 * 2 + 2 - head}, "the pooler is gone"
    rank = RunConfig().method.rank
    assert found["ffa_lora"].numbers == 4 * 64 * rank + head
    assert found["fra_lora"].numbers == 4 * (2 * 64 * rank - rank * rank) + head
    assert found["fra_then_ffa"].numbers == found["fra_lora"].numbers
    assert (found["ffa_lora"].correlation, found["rolora"].correlation) == ("banded", "none")
    assert [row.length for row in rows] == sorted(row.length for row in rows)
    for row in rows:
        own = replace(SETTING, dim=row.numbers, cohort=row.longer_below or 0)
        share = recommended(own, target, Possible(correlated=row.correlation == "banded")).share(own)
        assert share is not None
        assert 0.9 < share <= 1
    show_methods(PlainConsole(), "this", rows)
    out = capsys.readouterr().out
    assert all(f"{row.numbers:,}" in out for row in rows)


@pytest.mark.parametrize("task", [task for task in TASKS if task != "classification"])
def test_the_noise_of_every_task_is_measured(
    task: str, tmp_path: Path, small_model: Path, small_tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a language model, no head is counted, and chance is that of its vocabulary."""
    monkeypatch.setattr(catalogue, "METHODS", {"ffa_lora": METHODS["ffa_lora"]})
    decodes = task in ("multiple_choice", "chat", "causal_lm")
    model = decoder(tmp_path / "llama", small_tokenizer) if decodes else small_model
    (row,) = spaces(str(model), "model", SETTING, Target(8.0, None, 1e-5), Possible(), task=task)
    assert row.noise_alone is not None
    assert row.noise_alone["start"] is not None
    if task == "causal_lm":
        assert row.numbers == RunConfig().method.rank * (16 + 8), "B of the projections to queries and values"
        assert row.noise_alone["chance"] == pytest.approx(math.log(len(small_tokenizer)), rel=1e-4)


def test_with_weights_the_harm_is_measured_in_place_of_the_length(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three clients at epsilon 8 are called hopeless, with the cohort that would do; 5,000 are not."""
    monkeypatch.setattr(catalogue, "METHODS", {"ffa_lora": METHODS["ffa_lora"]})
    monkeypatch.setattr(budget_methods, "on", lambda *given: itertools.islice(catalogue.on(*given), 1))  # no sketches
    said, found = list[str](), []
    for setting in (replace(SETTING, clients=3, cohort=3, rounds=8), replace(SETTING, rounds=8)):
        (row,) = spaces("builtin/tiny", "model", setting, Target(8.0, None, 1e-5), Possible(), said.append)
        assert row.noise_alone is not None
        found.append(row)
    few, many = (row.noise_alone or {} for row in found)
    assert (few["hopeless"], few["texts"], many["hopeless"]) == (True, "made-up texts", False)
    assert few["chance"] == pytest.approx(math.log(8))
    assert few["full"] > 30 * few["start"] > 5 * (few["noised"] - few["start"]), "the server shortens its steps"
    assert 3 < few["enough"] < 1000
    assert said
    show_methods(PlainConsole(), "this", found[:1])
    out = capsys.readouterr().out
    assert f"{few['enough']:,}" in out
    assert "chance" in out
