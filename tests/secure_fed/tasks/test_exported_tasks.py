"""The code in an exported model's README loads the model, for every task."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from secure_fed import Federation, RunConfig
from secure_fed.export import trained
from secure_fed.learning import tasks
from tests.cells import chosen
from tests.secure_fed.tasks.conftest import Write
from tests.secure_fed.tasks.toy_tasks import TOYS


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    """The model's scores for three random texts of the small vocabulary, as one vector."""
    ids = torch.randint(4, 30, (3, 7), generator=torch.Generator().manual_seed(0))
    found: Any = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids), return_dict=True)
    names = [name for name in ("logits", "start_logits", "end_logits") if name in found]
    return torch.cat([found[name].flatten() for name in names])


@pytest.mark.parametrize(
    ("method", "task"),
    chosen(
        itertools.product(["fedlora", "adapter_pfeiffer"], TOYS),
        [*(("fedlora", task) for task in TOYS), ("adapter_pfeiffer", "causal_lm")],
    ),
)
def test_the_use_shown_in_the_readme_works(
    task: str, method: str, write: Write, small_model: Path, gpt2: Path, tmp_path: Path
) -> None:
    toy = TOYS[task]
    config = RunConfig.from_dict(
        {
            "model": {"name": str(gpt2 if toy.decoder else small_model), "max_length": 32},
            "data": {
                "task": task,
                "train": str(write("train", toy.rows(24))),
                "test": str(write("test", toy.rows(12))),
                **toy.settings,
            },
            "federation": {"clients": 2, "cohort": 2, "rounds": 1},
            "method": {"name": method},
            "training": {"lr": 0.05, "steps": 3, "batch_size": 4},
        }
    )
    Federation(config).run(tmp_path / "run")
    done = trained.load_run(tmp_path / "run")
    want = outputs(done.model)
    folders = [done.export(tmp_path / "out")]
    if method == "fedlora":
        folders.append(done.export(tmp_path / "whole", merged=True))
    for folder in folders:
        readme = (folder / "README.md").read_text(encoding="utf-8")
        scope: dict[str, Any] = {}
        exec(readme.split("```python\n")[1].split("```")[0].replace("path/to/this/folder", str(folder)), scope)
        found = outputs(scope["model"])
        assert (found - want).abs().max() <= 1e-5 * want.abs().max()
        if method == "fedlora":
            assert f"import {tasks.build(config.data).auto}\n" in readme


def test_the_readme_of_a_regression_says_how_its_scores_become_numbers(
    write: Write, small_model: Path, tmp_path: Path
) -> None:
    toy = TOYS["regression"]
    config = RunConfig.from_dict(
        {
            "model": {"name": str(small_model), "max_length": 32},
            "data": {"task": "regression", "train": str(write("train", toy.rows(12))), **toy.settings},
            "federation": {"clients": 2, "rounds": 1},
        }
    )
    federation = Federation(config)
    result = federation.run(tmp_path / "run")
    done = trained.load_run(tmp_path / "run")
    inputs = done.tokenizer(["calm word3"], return_tensors="pt")
    want = next(done.predict(["calm word3"]))["value"]
    folders = [done.export(tmp_path / "out"), done.export(tmp_path / "whole", merged=True)]
    for folder in (*folders, federation.export(result.state, tmp_path / "direct")):
        shown = (folder / "README.md").read_text(encoding="utf-8").rpartition("a prediction is `")[2].partition("`")[0]
        assert eval(shown, {"model": done.model, "inputs": inputs}).item() == pytest.approx(want, abs=1e-5)
