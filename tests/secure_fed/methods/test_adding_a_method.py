"""The file in docs/adding_a_method.md works as a method exactly as shown, and so does its row."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from secure_fed.config import RunConfig, own_files
from secure_fed.errors import ConfigError, MethodError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.methods import METHODS, averaged, build
from secure_fed.methods.method import CHANGE, LoraShaped
from secure_fed.tensors.tensors import LayoutError, Tensors
from tests.contracts import runs
from tests.golden import refused
from tests.secure_fed import toys

ROOT = Path(__file__).resolve().parents[3]
NAME = "stein_ffa"


def shown(language: str = "python") -> str:
    text = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
    (code,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return str(code)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file's module, imported and registered in the table of methods."""
    made = ModuleType(f"shown_{NAME}")
    monkeypatch.setitem(sys.modules, made.__name__, made)
    exec(compile(shown(), f"{NAME}.py", "exec"), made.__dict__)
    monkeypatch.setitem(METHODS, NAME, made.__name__)
    return made


MASKED = {"secure_aggregation.enabled": True}
PRIVATE = {"privacy.unit": "client", "privacy.noise_multiplier": 0.05, "privacy.delta": 1e-3, "privacy.clip_norm": 0.5}


def test_it_runs_in_private_and_behind_masks(module: ModuleType) -> None:
    settings = {**MASKED, **PRIVATE, "privacy.noise": "distributed"}
    federation = toys.federation({"method.name": NAME, "federation.rounds": 2, **settings}, sizes=(8,) * 6)
    assert isinstance(federation.assembly.method, LoraShaped), "PEFT can load its exports"
    result = federation.run()
    assert result.state.round == 2
    before, after = federation.assembly.initial.tensors, result.state.tensors
    for name in before:
        assert torch.equal(before.tensor(name), after.tensor(name)) == (".lora_A." in name)


def test_the_file_is_a_method_of_the_users_own_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise it trains as FFA-LoRA, its digest is in the configuration, and edited it does not resume the run."""
    (tmp_path / "stein.py").write_text(shown(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    settings = {"federation.rounds": 2, "training.steps": 3}
    with refused(ConfigError, "method.name"):
        build(RunConfig().replace({("method", "name"): "stein.py"}))
    own, ffa = (toys.federation({**settings, "method.name": name}) for name in ("stein.py", "ffa_lora"))
    assert re.fullmatch(re.escape(str(tmp_path / "stein.py")) + "@[0-9a-f]{16}", own.config.method.name)
    assert toys.same(own.run(tmp_path / "run").state.tensors, ffa.run().state.tensors)
    (tmp_path / "stein.py").write_text(shown().replace("numel() - 2", "numel() - 3"), encoding="utf-8")
    with refused(ConfigError, "method.name", hide="@[0-9a-f]{16}"):
        Federation(own.config)
    with refused(RunDirectoryError, hide="@[0-9a-f]{16}"):
        toys.federation({**settings, "method.name": "stein.py"}).run(tmp_path / "run", resume=True)


def test_a_stored_run_executes_no_file(tmp_path: Path) -> None:
    """An audit or an export of somebody's run folder would else execute a file that the folder chose. `train --resume` may."""
    code = f"{shown()}\nopen({str(tmp_path / 'executed')!r}, 'w').close()\n"
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    noted = f"{tmp_path / 'own.py'}@{sha256((tmp_path / 'own.py').read_bytes()).hexdigest()[:16]}"
    config = toys.config({"method.name": noted})
    with refused(ConfigError, "method.name", hide="@[0-9a-f]{16}"):
        Federation(config)
    assert not (tmp_path / "executed").exists()
    own_files.allow("method.name", noted)
    assert build(config).card.name == "stein_ffa"
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "text",
    [
        None,
        "import nothing_of_this_name",
        "",
        "from secure_fed.methods.ffa_lora import CARD",
        "from secure_fed.methods.ffa_lora import CARD, build",
    ],
)
def test_a_file_that_is_no_method_is_refused(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text, encoding="utf-8")
    with refused(ConfigError, "method.name", hide="@[0-9a-f]{16}"):
        Federation(RunConfig().replace({("method", "name"): str(tmp_path / "own.py")}))


def test_the_row_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = eval(f"({shown('py')})", vars(averaged))
    monkeypatch.setitem(averaged.TABLE, row.name, row)
    monkeypatch.setitem(METHODS, row.name, averaged.__name__)
    federation = runs.federation(runs.settings(row.name, "client"))
    after, before = federation.run().state.tensors, federation.assembly.initial.tensors
    assert not any(torch.equal(before.tensor(name), after.tensor(name)) for name in before)
    assert all(".attention.output.dense.adapter." in name for name in before if "encoder" in name)


@pytest.mark.parametrize("length", [0.0, 0.1, 1.0, 10.0])
def test_a_noised_mean_comes_nearer_to_the_truth(module: ModuleType, length: float) -> None:
    """On average, for a true mean of any norm, and most for a norm below the noise's. A wrong factor fails."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.full((50,), length / 50**0.5)
    noised = [truth + 0.2 * torch.randn(50, generator=generator) for _ in range(400)]
    plain = sum(float((y - truth).square().sum()) for y in noised)
    ours = sum(float((module.stein(y, 0.2) - truth).square().sum()) for y in noised)
    assert ours < plain
    assert length > 1 or ours < 0.6 * plain


def test_apply_uses_the_noise_that_it_is_told_of(module: ModuleType) -> None:
    federation = toys.federation({"method.name": NAME})
    method, state = federation.assembly.method, federation.assembly.initial
    layout = method.layout(state, CHANGE)
    mean = layout.unflatten(torch.full((layout.size,), 0.1))
    for std, factor in ((0.0, 1.0), (0.05, None), (10.0, 0.0)):
        after = method.apply(state, {CHANGE: mean}, std)
        for name in mean:
            count = mean.tensor(name).numel()
            kept = factor if factor is not None else 1 - (count - 2) * std**2 / (count * 0.01)
            kept = 1.0 if count < 3 else kept
            step = after.tensors.tensor(name) - state.tensors.tensor(name)
            assert torch.allclose(step, torch.full_like(step, 0.1 * kept), atol=1e-6)


LESS = ["classifier.bias"]
WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "two rounds": ("apply", lambda state: replace(state, round=state.round + 1)),
    "no state": ("apply", lambda state: state.tensors),
    "a tensor less": ("apply", lambda state: replace(state, tensors=state.tensors.without(LESS))),
    "another shape": ("apply", lambda state: replace(state, tensors=state.tensors | {LESS[0]: torch.zeros(1, 2)})),
    "another layout": ("contribute", lambda contribution: contribution.without(LESS)),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_method_that_breaks_the_protocol_is_named(
    module: ModuleType, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, broken = WRONG[what]
    usual = getattr(module.SteinFfa, function)
    monkeypatch.setattr(module.SteinFfa, function, lambda *given: broken(usual(*given)))
    with refused(LayoutError if function == "contribute" else MethodError):
        toys.federation({"method.name": NAME}).run()


@pytest.mark.parametrize("unit", ["example", "client"])
def test_tensors_made_of_all_examples_are_refused_where_each_is_protected(
    module: ModuleType, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through them every example's gradient depends on all of the client's examples; a method may even send them."""

    def context(own: Any, initial: Tensors, examples: Sequence[Any]) -> Tensors:
        return initial.select(LESS) * float(len(examples))

    monkeypatch.setattr(module.SteinFfa, "context", context, raising=False)
    more = {"method.name": NAME, **PRIVATE, "privacy.unit": unit, "federation.rounds": 1}
    built = toys.federation(more, sizes=(8,) * 6)
    with refused(ConfigError) if unit == "example" else nullcontext():
        built.run()


def test_it_is_as_short_as_the_page_says_and_passes_the_checks(tmp_path: Path) -> None:
    code = shown()
    assert len([line for line in code.splitlines() if line.strip()]) < 60
    (tmp_path / f"{NAME}.py").write_text(code, encoding="utf-8")
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
