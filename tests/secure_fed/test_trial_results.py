"""Pass sizes are found once, and anew where anything that could change a bit differs."""

from __future__ import annotations

import copy
import json
import os
import stat
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.entropy import SeededEntropy
from secure_fed.activity import shown_by
from secure_fed.config import RunConfig
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate, per_token
from secure_fed.learning.models.dropout_and_checkpointing import set_checkpointing
from secure_fed.learning.tasks import classification
from secure_fed.learning.tasks.classification import weighed_loss
from secure_fed.learning.training.common_passes import packing
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trial_results import PASS_SIZES, Kept, user_file
from tests.secure_fed import small_models, toys

CPU, PAD_0 = torch.device("cpu"), Collate(0)
TEXTS = [
    {"input_ids": [1 + (row * 7 + word) % 29 for word in range(4 + row % 4)], "labels": row % 3} for row in range(12)
]


def parts(objective: Objective, collate: Any = PAD_0) -> dict[str, str]:
    objective.kept.files = [Path("unused")]
    found = objective.surroundings(collate, ["classifier.weight", "classifier.bias"])
    assert found is not None
    return found


@cache
def usual_parts() -> dict[str, str]:
    """They are the same for another model with the same weights."""
    found = parts(made())
    assert parts(made()) == found
    return found


def made(model: nn.Module | None = None, loss: Any = classification.loss, **own: Any) -> Objective:
    return Objective(small_models.make("bert") if model is None else model, loss, CPU, **own)


def changed(edit: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], dict[str, str]]:
    def after(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        model = small_models.make("bert")
        edit(model)
        return parts(made(model))

    return after


def patched(target: str, value: Any) -> Callable[[pytest.MonkeyPatch], dict[str, str]]:
    def after(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
        monkeypatch.setattr(target, value)
        return parts(made())

    return after


@pytest.mark.parametrize(
    ("part", "after"),
    [
        ("model", changed(lambda model: model.bert.encoder.layer[1].output.dense.weight.data.add_(1e-3))),
        ("model", changed(lambda model: setattr(model.bert.encoder.layer[0].output, "extra", nn.Linear(2, 2)))),
        ("tensors", changed(lambda model: model.bfloat16())),
        ("attention", changed(lambda model: setattr(model.config, "_attn_implementation", "eager"))),
        ("quantisation", changed(lambda model: setattr(model.config, "quantization_config", {"load_in_4bit": True}))),
        ("checkpointing", changed(lambda model: set_checkpointing(model, True))),
        ("task", lambda monkeypatch: parts(made(loss=partial(weighed_loss, by_class=(1.0, 2.0, 1.0))))),
        ("task", lambda monkeypatch: parts(made(), Collate(0, per_token))),
        ("task", lambda monkeypatch: parts(made(longest=9))),
        ("libraries", patched("secure_fed.learning.training.trial_results._version", lambda name: "0")),
        ("libraries", patched("secure_fed.learning.training.trial_results._own_code", lambda: "0")),
        ("build", patched("torch.__config__.show", lambda: "another BLAS")),
        ("flags", patched("torch.get_float32_matmul_precision", lambda: "medium")),
        ("variables", patched("os.environ", {**os.environ, "MKL_CBWR": "COMPATIBLE"})),
        ("processor", patched("secure_fed.learning.training.trial_results._processor", lambda: "another")),
        ("processor", patched("torch.backends.cpu.get_cpu_capability", lambda: "another")),
        ("threads", patched("torch.get_num_threads", lambda: 7)),
    ],
)
def test_a_part_that_differs_changes_the_key(
    part: str, after: Callable[[pytest.MonkeyPatch], dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = usual_parts()
    other = after(monkeypatch)
    assert other[part] != before[part]
    found = []
    own = Kept()
    for around in (before, other):
        own.results.clear()
        own.sizes("width 8", lambda around=around: around, lambda: found.append(1) or (2,))  # type: ignore[func-returns-value]
    assert len(found) == 2, "tried anew"


def test_a_result_is_found_once_in_memory_and_once_on_disk(tmp_path: Path) -> None:
    tries: list[int] = []
    files = [tmp_path / "run" / PASS_SIZES, tmp_path / "user" / PASS_SIZES]
    for folder in files:
        folder.parent.mkdir()

    def sizes(own: Kept, around: dict[str, str] | None) -> tuple[int, ...]:
        return own.sizes("width 8", lambda: around, lambda: (tries.append(1), (2, 6))[1])

    first = Kept()
    first.files = files
    assert [sizes(first, {"model": "a"}) for _ in range(2)] == [(2, 6)] * 2
    assert len(tries) == 1
    for file in files:
        assert list(json.loads(file.read_text()).values()) == [[2, 6]]
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        later = Kept()
        later.files = [file]
        assert sizes(later, {"model": "a"}) == (2, 6)
    assert len(tries) == 1
    for content in ("", "[]", '{"a": [0]}', '{"a": ["2"]}'):
        files[0].write_text(content)
        files[1].write_text(content)
        broken = Kept()
        broken.files = files
        assert sizes(broken, {"model": "a"}) == (2, 6)
    assert len(tries) == 5, "what cannot be read is found again"
    untold = Kept()
    untold.files = [tmp_path / "untold.json"]
    assert sizes(untold, None) == (2, 6)
    assert not untold.files[0].exists()


@pytest.mark.parametrize(
    "edit",
    [
        lambda model: model.classifier.register_forward_hook(lambda layer, args, y: y),
        lambda model: setattr(model.classifier, "forward", lambda x: x),
        lambda model: model.register_backward_hook(lambda *given: None),
    ],
)
def test_what_cannot_be_told_stays_in_memory(edit: Callable[[Any], Any]) -> None:
    model = small_models.make("bert")
    edit(model)
    assert made(model).surroundings(Collate(0), []) is None
    value = torch.nn.Linear(2, 2)
    assert made(loss=lambda model, batch: value(batch)).surroundings(Collate(0), []) is None


UNIT = {
    **{"privacy.unit": "example", "privacy.noise_multiplier": 1.0, "privacy.delta": 0.01, "federation.rounds": 1},
    "privacy.clip_norm": 1.0,
}


def private(config: RunConfig) -> Federation:
    model = small_models.make("bert")
    return Federation(config, model=model, train=[TEXTS, TEXTS], test=TEXTS, entropy=SeededEntropy(1))


def test_a_run_says_how_far_its_trials_are_and_a_second_run_compares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is small, so that examples share passes, and texts have two widths. The guarantee is told before any trial."""
    told: list[str] = []
    compared: list[tuple[int, ...]] = []
    agreeing = packing.agreeing_sizes

    def counted(run: Any, probe: Any, candidates: tuple[int, ...]) -> tuple[int, ...]:
        compared.append(candidates)
        return agreeing(run, probe, candidates)

    monkeypatch.setattr(packing, "agreeing_sizes", counted)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def train(out: Path) -> None:
        settings = {"training.batch_size": 12, "method.modules_to_save": []}
        built = private(toys.config({**UNIT, **settings}))
        built.callbacks.append(SimpleNamespace(on_promise=lambda sentences: told.append("promised")))
        with shown_by(lambda what, began: told.append(what or "")):
            built.run(out)

    train(tmp_path / "first")
    trials = ("checking that each example's loss is its own", "checking how many examples can share a pass")
    order = [next(at for at, said in enumerate(told) if what in said) for what in ("promised", *trials)]
    assert order == sorted(order)
    assert any("evaluating in batches" in said for said in told[order[-1] :])
    assert 1 <= len(compared) <= 2, "at most one comparison a width"
    assert user_file() == tmp_path / "cache" / "secure-fed" / PASS_SIZES
    beside = json.loads((tmp_path / "first" / "private" / PASS_SIZES).read_text())
    assert beside.items() <= json.loads(user_file().read_text()).items()
    done = len(compared)
    train(tmp_path / "second")
    assert len(compared) == done, "kept per user"


def test_without_a_folder_for_caches_nothing_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert user_file() is None
    federation = toys.federation({**UNIT, "training.batch_size": 2})
    federation.run()
    assert federation.assembly.objective.kept.files == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_without_privacy_a_trial_reads_no_more_than_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the run: four texts of 100 words."""
    read: list[int] = []
    loss = classification.loss

    def counted(model: nn.Module, batch: Any) -> Tensor:
        read.append(batch["input_ids"].numel())
        return loss(model, batch)

    long = [{"input_ids": [1 + (row + word) % 29 for word in range(100)], "labels": row % 3} for row in range(4)]
    model = copy.deepcopy(small_models.make("llama"))
    settings = {"training.together": 8, "training.batch_size": 4, "federation.rounds": 1, "method.modules_to_save": []}
    Federation(toys.config(settings), model=model, train=[long, long], test=TEXTS[:2], loss=counted).run()
    assert sum(read) - 2 * 400 <= 400
