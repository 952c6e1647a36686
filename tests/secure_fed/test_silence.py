"""No command is silent for long on a terminal, however slow its model: the one place where tests measure time, at night.

On every change, `test_trial_results.py` shows that a run says what it does, and `test_activity.py` that a terminal shows it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from secure_fed.learning.data.notes import LABELS
from secure_fed.learning.models.locate import locate
from tests.terminal import Seen, seen

pytestmark = pytest.mark.nightly
SLOW = Path(__file__).parents[1] / "slow_model.py"
LONGEST = 5.0  # seconds of silence
START = 15.0  # seconds until the first word, which Python's own start on a loaded machine takes part of
RUN = [
    "--set=data.examples=40",
    "--set=data.test_examples=20",
    "--set=model.max_length=16",
    "--set=federation.clients=2",
    "--set=federation.rounds=1",
    "--set=method.name=ffa_lora",
    "--set=training.steps=1",
    "--set=training.batch_size=4",
    "--set=evaluation.record=updates",
]
PRIVATE = ["--set=privacy.unit=example", "--set=privacy.noise_multiplier=1", "--set=privacy.delta=1e-4"]


def ran(folder: Path, seconds: float, *arguments: str, status: int = 0) -> Seen:
    """The command with a model whose passes take `seconds` longer, if it was never silent for long."""
    found = seen([str(SLOW), str(seconds), *arguments], folder, {"HF_HUB_OFFLINE": "1"})
    assert found.status == status, found.plain[-2000:]
    (first,) = [gap for gap, before in found.gaps if not before]
    assert first < START
    longest, before = max((gap, before) for gap, before in found.gaps if before)
    assert longest < LONGEST, f"silent for {longest:.1f} s after {before!r}"
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Seen]:
    """A private run, and what its terminal showed."""
    folder = tmp_path_factory.mktemp("silence")
    return folder, ran(folder, 0.1, "train", *RUN, *PRIVATE, "--out=run")


def test_before_its_trials_a_run_shows_its_guarantee_and_then_how_far_they_are(trained: tuple[Path, Seen]) -> None:
    text = trained[1].plain
    shown = [text.index(part) for part in ("loading the model", "guarantee: (", "noise: ", "cost: epsilon")]
    checked = text.index("checking that each example's loss is its own")
    compared = text.index("checking how many examples can share a pass")
    assert sorted(shown) == shown
    assert max(shown) < checked < compared < text.index("evaluating in batches: 1 of ")


def test_answering_texts_is_not_silent(trained: tuple[Path, Seen]) -> None:
    (trained[0] / "texts.txt").write_text("no fever\n", encoding="utf-8")
    assert "labelling texts in batches: 1 of 1" in ran(trained[0], 7.0, "predict", "run", "texts.txt").plain


@pytest.mark.parametrize(
    ("seconds", "arguments"),
    [
        (0.0, ["train", "--resume", "--out=run"]),
        (0.0, ["export", "run", "exported", "--merged"]),
        (0.2, ["audit", "run", "run", "--references=2"]),
        (0.0, ["report", "run"]),
        (0.0, ["methods", f"--model={locate('builtin/tiny')}", "--classes=3"]),
        (0.0, ["secagg", "--clients=300", "--dim=20000"]),
        (0.0, ["budget", "plan", "--epsilon=8", "--delta=1e-7", "--rounds=20000", "--clients=1000000", "--cohort=100"]),
    ],
    ids=lambda given: " ".join(given[:2]) if isinstance(given, list) else "",
)
def test_no_command_is_silent(trained: tuple[Path, Seen], seconds: float, arguments: list[str]) -> None:
    ran(trained[0], seconds, *arguments)


def test_a_comparison_is_not_silent(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.toml").write_text('[method]\nname = "ffa_lora"\n', encoding="utf-8")
    ran(tmp_path, 0.3, "compare", "one.toml", "two.toml", "--seeds=0", *RUN, *PRIVATE, "--out=both")


def test_an_audit_of_any_model_is_not_silent(trained: tuple[Path, Seen]) -> None:
    folder = trained[0]
    ran(folder, 0.0, "export", "run", "whole", "--merged")
    for name in ("members", "others"):
        rows = [json.dumps({"text": f"{name} {row} fever", "label": LABELS[row % 2]}) for row in range(12)]
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    ran(
        folder, 3.0, "audit", "model", "whole", "--members=members.jsonl", "--non-members=others.jsonl", "--out=audited"
    )
