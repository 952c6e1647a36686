"""The file in docs/adding_a_method.md works as a method exactly as shown, and so does its row."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel

from secure_fed.config import RunConfig, own_files
from secure_fed.errors import ConfigError, MethodError, RunDirectoryError
from secure_fed.federation import Federation
from secure_fed.methods import METHODS, averaged, build
from secure_fed.methods.method import CHANGE, LoraShaped, State
from secure_fed.tensors.tensors import LayoutError, Tensors
from tests.contracts import runs
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
PRIVATE = {"privacy.unit": "client", "privacy.epsilon": 200.0, "privacy.clip_norm": 0.5}


@pytest.mark.parametrize(
    "settings",
    [{}, MASKED, PRIVATE, {**MASKED, **PRIVATE, "privacy.noise": "distributed"}],
    ids=["plain", "masked", "private", "masked and private"],
)
def test_it_runs(module: ModuleType, settings: dict[str, Any]) -> None:
    federation = toys.federation({"method.name": NAME, "federation.rounds": 2, **settings}, sizes=(8,) * 6)
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
    with pytest.raises(ConfigError, match=r"'stein.py' is a file of a user's own: it is executed only where"):
        build(RunConfig().replace({("method", "name"): "stein.py"}))
    own, ffa = (toys.federation({**settings, "method.name": name}) for name in ("stein.py", "ffa_lora"))
    assert re.fullmatch(re.escape(str(tmp_path / "stein.py")) + "@[0-9a-f]{16}", own.config.method.name)
    assert toys.same(own.run(tmp_path / "run").state.tensors, ffa.run().state.tensors)
    (tmp_path / "stein.py").write_text(shown().replace("numel() - 2", "numel() - 3"), encoding="utf-8")
    with pytest.raises(ConfigError, match="has another content now than the run began with"):
        Federation(own.config)
    with pytest.raises(RunDirectoryError, match=r"another configuration .*method.name"):
        toys.federation({**settings, "method.name": "stein.py"}).run(tmp_path / "run", resume=True)


def test_a_stored_run_executes_no_file(tmp_path: Path) -> None:
    """An audit or an export of somebody's run folder would else execute a file that the folder chose. `train --resume` may."""
    code = f"{shown()}\nopen({str(tmp_path / 'executed')!r}, 'w').close()\n"
    (tmp_path / "own.py").write_text(code, encoding="utf-8")
    noted = f"{tmp_path / 'own.py'}@{sha256((tmp_path / 'own.py').read_bytes()).hexdigest()[:16]}"
    config = toys.config({"method.name": noted})
    with pytest.raises(ConfigError, match="executed only where"):
        Federation(config)
    assert not (tmp_path / "executed").exists()
    own_files.allow("method.name", noted)
    assert build(config).card.name == "stein_ffa"
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (None, "is no file"),
        ("import nothing_of_this_name", "cannot be executed (ModuleNotFoundError"),
        ("", "has no CARD"),
        ("from secure_fed.methods.ffa_lora import CARD", "has no function build(run)"),
        ("from secure_fed.methods.ffa_lora import CARD, build", "names its method 'ffa_lora'"),
    ],
)
def test_a_file_that_is_no_method_is_refused(tmp_path: Path, text: str | None, why: str) -> None:
    if text is not None:
        (tmp_path / "own.py").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=re.escape(why)) as caught:
        Federation(RunConfig().replace({("method", "name"): str(tmp_path / "own.py")}))
    assert caught.value.setting == "method.name"


@pytest.mark.parametrize("unit", ["none", "client"])
def test_the_row_runs(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    (row,) = eval(f"({shown('py')})", vars(averaged))
    monkeypatch.setitem(averaged.TABLE, row.card.name, row)
    monkeypatch.setitem(METHODS, row.card.name, averaged.__name__)
    federation = runs.federation(runs.settings(row.card.name, unit))
    after, before = federation.run().state.tensors, federation.assembly.initial.tensors
    assert not any(torch.equal(before.tensor(name), after.tensor(name)) for name in before)
    assert all(".attention.output.dense.adapter." in name for name in before if "encoder" in name)


def test_without_noise_it_is_ffa_lora(module: ModuleType) -> None:
    settings = {"federation.rounds": 2, "training.steps": 3}
    ours, ffa = (toys.federation({**settings, "method.name": name}).run() for name in (NAME, "ffa_lora"))
    assert toys.same(ours.state.tensors, ffa.state.tensors)


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


def test_an_optimizer_that_adds_up_means_is_refused(module: ModuleType) -> None:
    """The noise in an accumulated mean is not one round's noise, by which `stein` shortens."""
    with pytest.raises(ConfigError, match=r"server_optimizer = 'adam' cannot be used.*stein_ffa.*noise of one round"):
        toys.federation({"method.name": NAME, "federation.server_optimizer": "adam"})


def test_it_is_exported_for_peft(module: ModuleType, tmp_path: Path) -> None:
    federation = toys.federation({"method.name": NAME})
    assert isinstance(federation.assembly.method, LoraShaped)
    result = federation.run()
    out = federation.export(result.state, tmp_path / "out")
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    loaded = PeftModel.from_pretrained(toys.model(), str(out)).eval()
    want = federation.load(result.state).eval()(x)
    assert torch.allclose(loaded(x), want, atol=1e-6)
    assert not torch.allclose(toys.model().eval()(x), want, atol=1e-3)


WRONG_STATES: dict[str, Callable[[State], Any]] = {
    "returns round 2 after round 0; `round` must grow by one": lambda state: replace(state, round=state.round + 1),
    "returns Tensors, and not the next State": lambda state: state.tensors,
    "returns other tensors than the state has: 'classifier.bias' is missing": lambda state: replace(
        state, tensors=state.tensors.without(["classifier.bias"])
    ),
    "has shape (1, 2) in place of (3,)": lambda state: replace(
        state, tensors=state.tensors | {"classifier.bias": torch.zeros(1, 2)}
    ),
}


@pytest.mark.parametrize("why", WRONG_STATES)
def test_an_apply_that_makes_no_next_state_is_refused(
    module: ModuleType, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = module.SteinFfa.apply
    monkeypatch.setattr(module.SteinFfa, "apply", lambda *given: WRONG_STATES[why](usual(*given)))
    with pytest.raises(MethodError, match=re.escape("stein_ffa's apply ") + ".*" + re.escape(why)):
        toys.federation({"method.name": NAME}).run()


def test_a_contribution_of_another_layout_is_named(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = module.SteinFfa.contribute
    monkeypatch.setattr(module.SteinFfa, "contribute", lambda *given: usual(*given).without(["classifier.bias"]))
    with pytest.raises(LayoutError, match=r"disagree on the content of pass 'change': 'classifier.bias' is missing"):
        toys.federation({"method.name": NAME}).run()


@pytest.mark.parametrize("unit", ["example", "client"])
def test_tensors_made_of_all_examples_are_refused_where_each_is_protected(
    module: ModuleType, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through them every example's gradient depends on all of the client's examples; a method may even send them."""

    def context(own: Any, initial: Tensors, examples: Sequence[Any]) -> Tensors:
        return initial.select(["classifier.bias"]) * float(len(examples))

    monkeypatch.setattr(module.SteinFfa, "context", context, raising=False)
    built = toys.federation({"method.name": NAME, **PRIVATE, "privacy.unit": unit}, sizes=(8,) * 6)
    if unit == "client":
        built.run()
        return
    with pytest.raises(
        ConfigError, match=r"stein_ffa makes 'classifier.bias' of all of a client's examples.*'example'"
    ):
        built.run()


def test_it_is_as_short_as_the_page_says_and_passes_the_checks(tmp_path: Path) -> None:
    code = shown()
    assert len([line for line in code.splitlines() if line.strip()]) < 60
    (tmp_path / f"{NAME}.py").write_text(code, encoding="utf-8")
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--config", str(ROOT / "pyproject.toml"), str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
