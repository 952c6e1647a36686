"""Exports and import paths from before the files moved. `old_exports` holds two export folders of then, without tensors."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForSequenceClassification
from torch import nn

import secure_fed
from secure_fed import Federation, RunConfig

OLD = Path(__file__).parent / "old_exports"
SITE = Path(secure_fed.__file__).parents[1]
CONFIG: dict[str, dict[str, Any]] = {
    "data": {"examples": 60, "test_examples": 20},
    "federation": {"clients": 3, "rounds": 1},
    "training": {"steps": 1},
}
METHODS = {"fedlora": {"name": "fedlora", "rank": 2}, "adapter_houlsby": {"name": "adapter_houlsby"}}


@torch.no_grad()
def scores(model: nn.Module) -> torch.Tensor:
    ids = torch.randint(5, 300, (3, 9), generator=torch.Generator().manual_seed(0))
    out: torch.Tensor = model.eval()(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
    return out


def exported(name: str, out: Path) -> torch.Tensor:
    """Writes an old export with new tensors and the old files of `old_exports`; returns the scores of its model."""
    built = Federation(RunConfig.from_dict({**CONFIG, "method": METHODS[name]}))
    result = built.run()
    built.export(result.state, out)
    for file in (OLD / name).iterdir():
        shutil.copy(file, out)
    note = out / "adapter_config.json"
    if note.exists():
        note.write_text(note.read_text(encoding="utf-8").replace("SITE_PACKAGES", SITE.as_posix()), encoding="utf-8")
    return scores(built.load(result.state))


def by_its_readme(out: Path) -> nn.Module:
    code = (out / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(code.replace("path/to/this/folder", str(out)), scope)
    model: nn.Module = scope["model"]
    return model


def test_a_peft_folder_loads_by_its_readme_and_by_the_path_in_it(tmp_path: Path) -> None:
    want = exported("fedlora", tmp_path / "out")
    sys.modules.pop("secure_fed.models.loading", None)
    with pytest.warns(DeprecationWarning, match=r"secure_fed\.models\.loading\.locate is secure_fed\.locate now"):
        loaded = by_its_readme(tmp_path / "out")
    assert torch.equal(scores(loaded), want)
    found = AutoPeftModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=8)
    assert torch.equal(scores(found), want)


def test_a_folder_of_ours_loads(tmp_path: Path) -> None:
    want = exported("adapter_houlsby", tmp_path / "out")
    assert torch.equal(scores(by_its_readme(tmp_path / "out")), want)


@pytest.mark.parametrize(
    ("module", "name", "now"),
    [("secure_fed.models.loading", "locate", "locate"), ("secure_fed.trained", "load", "load_run")],
)
def test_old_import_paths_work_with_a_warning(
    module: str, name: str, now: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    said = rf"{re.escape(module)}\.{name} is secure_fed\.{now} now"
    with pytest.warns(DeprecationWarning, match=said):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(secure_fed, now)


@pytest.mark.nightly
def test_old_import_paths_are_found_by_a_process_that_has_imported_nothing() -> None:
    code = (
        "from secure_fed.models.loading import locate\nfrom secure_fed.trained import load\nimport secure_fed\n"
        "assert locate is secure_fed.locate and load is secure_fed.load_run and locate('builtin/tiny')"
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for now in (
        "secure_fed.models.loading.locate is secure_fed.locate now",
        "secure_fed.trained.load is secure_fed.load_run now",
    ):
        assert f"DeprecationWarning: {now}" in done.stderr
