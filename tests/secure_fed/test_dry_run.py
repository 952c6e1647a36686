"""`secure-fed train --dry-run`: what it foresees is what the run does, and it trains, writes and reserves nothing."""

from __future__ import annotations

import json
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from privacy.entropy import SeededEntropy
from privacy.errors import BudgetExhausted
from privacy.ledger import Ledger
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.learning.models.quantised import scales
from secure_fed.learning.problem import configured
from secure_fed.learning.tasks.next_tokens import rows_together
from secure_fed.learning.training.common_passes import pass_memory
from secure_fed.learning.training.common_passes.passes import Pack, Places, found_in
from secure_fed.learning.training.local import Placed, losses
from secure_fed.methods import METHODS, build
from secure_fed.runs.assembly import Assembly, assemble
from secure_fed.runs.dry_run import foreseen
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import small_llama
from tests.secure_fed.conftest import Ran, Refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, small_tokenizer: Any) -> Path:
    """A small Llama with its tokenizer, its description alone, and texts of 4 to 9 words and four of 60."""
    place = tmp_path_factory.mktemp("dry")
    small_llama.save(place / "model", small_tokenizer, hidden_size=64, intermediate_size=160).save_pretrained(
        place / "shapes"
    )
    small_tokenizer.save_pretrained(place / "shapes")
    small_llama.write_texts(place, small_tokenizer, long=4)
    return place


def settings(
    folder: Path, method: str = "fedlora", unit: str = "none", task: str = "causal_lm", **more: Any
) -> RunConfig:
    made = small_llama.tables(folder, "model", method, unit, task)
    made["federation"]["sampling"] = "fixed" if unit == "none" else "poisson"
    changes = {tuple(key.split(".", 1)): value for key, value in more.items()}
    return RunConfig.from_dict(made).replace(changes)  # type: ignore[arg-type]


def of_shapes(config: RunConfig) -> Assembly:
    return assemble(config, build(config), configured(config, shapes=True))


class Naive(TorchDispatchMode):
    """The largest sum of the sizes of tensors with numbers that live at one time, beyond those that were there before."""

    def __init__(self, there: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._known = {one.untyped_storage()._cdata for one in there}
        self._there, self.now, self.most = there, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and (key := one.untyped_storage()._cdata) not in self._known:
                storage = one.untyped_storage()
                self._known.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return found

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


def measured(config: RunConfig, each: bool, count: int) -> tuple[int, int]:
    """The memory of a pass with numbers, and of an evaluation, by `Naive`."""
    built = Federation(config, entropy=SeededEntropy(1)).assembly
    places, pack = parts(built, each, count, torch.device("cpu"))
    there = [*built.problem.model.parameters(), *built.problem.model.buffers(), places.moving]
    there += [*places.shared.values(), *places.own.values()]
    found_in(built.objective, places, pack)  # comparisons of the model's own parts are made once
    with Naive(there) as training:
        found_in(built.objective, places, pack)
    built.objective.eval()
    with Naive(there) as evaluating, torch.no_grad(), rows_together():
        losses(built.objective, built.problem.collate, pack.items)
    return training.most, evaluating.most


def parts(built: Assembly, each: bool, count: int, device: torch.device) -> tuple[Places, Pack]:
    trainable = built.method.plan(built.initial).trainable
    placed = [Placed.of(built.initial.tensors, trainable, device) for _ in range(2)]
    items = sorted((item for own in built.problem.train for item in own), key=lambda item: -len(item["input_ids"]))
    pack = Pack([number % 2 for number in range(count)], items[:count], built.problem.collate, count, each=each)
    return Places.of(placed), pack


CASES = [
    (method, task, again, each)
    for method in METHODS
    for task in ("classification", "causal_lm")
    for again in (False, True)
    for each in (False, True)
    if (method, task) not in (("head", "causal_lm"), ("bitfit", "causal_lm"), ("bitfit", "classification"))
]


@pytest.mark.parametrize(
    ("method", "task", "again", "each"),
    chosen(
        CASES,
        [
            ("fedlora", "causal_lm", True, True),
            ("fedara", "classification", True, False),
        ],
    ),
)
def test_shapes_alone_tell_the_memory_of_a_pass(folder: Path, method: str, task: str, again: bool, each: bool) -> None:
    """Within a tenth of the tensors that live in the same pass with numbers, and of an evaluation."""
    own = {"training.checkpointing": again, "training.together": 1, "model.max_length": 64}  # attention takes room then
    config = settings(folder, method, task=task, **own)
    shapes = of_shapes(config)
    places, pack = parts(shapes, each, 4, torch.device("meta"))
    training, evaluating = measured(config, each, 4)
    assert pass_memory.of_pass(shapes.objective, places, pack).peak == pytest.approx(training, rel=0.1)
    found = pass_memory.of_evaluation(shapes.objective, pack.items, shapes.problem.collate).peak
    assert found == pytest.approx(evaluating, rel=0.1)


def test_memory_grows_with_what_a_run_holds(folder: Path) -> None:
    def memory(**more: Any) -> dict[str, Any]:
        found: dict[str, Any] = foreseen(settings(folder, **more))["memory"]
        return found

    usual = memory()
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    adapters = 4 * of_shapes(settings(folder)).initial.tensors.numel
    stored = sum(one.nbytes for one in [*base.parameters(), *base.buffers()])
    assert usual["parts"]["weights"] == stored + adapters
    assert usual["parts"]["inputs of layers computed again"] == 0
    private = memory(unit="example")
    assert private["parts"]["their gradients and moments"] == 2 * usual["parts"]["their gradients and moments"]
    sgd = memory(**{"training.optimizer": "sgd", "training.lr": 0.1})
    assert 3 * sgd["parts"]["their gradients and moments"] == usual["parts"]["their gradients and moments"]


@pytest.mark.parametrize("bits", chosen(["4bit", "8bit"], ["4bit"]))
def test_quantised_layers_count_with_their_bits(folder: Path, bits: str) -> None:
    pytest.importorskip("bitsandbytes")
    config = settings(folder, **{"model.quantization": bits})
    built = Federation(config, entropy=SeededEntropy(1)).assembly
    model = built.problem.model
    beside = [one for name, one in scales(model).items() if "bitsandbytes" not in name]  # which are settings
    expected = sum(one.nbytes for one in [*model.parameters(), *model.buffers(), *beside])
    own = config.replace({("model", "name"): str(folder / "shapes")})
    assert foreseen(own)["memory"]["parts"]["weights"] == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("unit", chosen(small_llama.UNITS, ["none"]))
def test_a_dry_run_says_what_the_run_then_does(folder: Path, unit: str, tmp_path: Path) -> None:
    config = settings(folder, unit=unit, task="classification")
    found, said = foreseen(config), Federation(config, entropy=SeededEntropy(1)).run(tmp_path / "run").summary
    sent = [found["traffic"]["rounds"] * found["traffic"][name] for name in ("bytes_up", "bytes_down")]
    assert sent == [said["bytes_up"], said["bytes_down"]]
    assert found["data"]["clients"] == said["clients"]
    assert sum(found["data"]["labels"].values()) == found["data"]["rows"] == 24
    if unit == "none":
        assert found["privacy"] is None
    else:
        for name in ("epsilon", "delta", "clip_norm"):
            assert found["privacy"][name] == (said[name] if name in said else said["privacy"][name])


def test_a_dry_run_says_the_guarantee_of_the_run(folder: Path) -> None:
    """Without the run: its public passes are tried out for long."""
    config = settings(folder, unit="client", task="classification")
    found, protection = foreseen(config)["privacy"], Federation(config).assembly.protection
    assert protection.plan is not None
    assert (found["epsilon"], found["clip_norm"]) == (protection.plan.epsilon(), protection.clip_norm)
    assert any("guarantee" in sentence for sentence in found["words"])


def files_of(folder: Path, rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The settings of a training file and a test file of these rows."""
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {f"data.{split}": str(folder / f"{split}.jsonl") for split in ("train", "test")}


def test_counts_of_rows_that_are_cut_or_teach_nothing(folder: Path, tmp_path: Path) -> None:
    words = json.loads((folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[0])["text"].split()
    rows = [{"text": words[0], "answer": words[1]}, *[{"text": " ".join(words), "answer": words[0]}] * 2]
    own = {"data.text_b": "answer", "federation.clients": 1, "federation.cohort": 1}
    found = foreseen(settings(folder, **files_of(tmp_path, rows), **own))
    assert (found["data"]["rows"], found["data"]["rows_at_the_limit"], found["data"]["labels"]) == (3, 2, None)


OF_TASKS: dict[str, dict[str, Any]] = {
    "regression": {"text": "the cat sat", "label": 0.5},
    "multi_label": {"text": "the cat sat", "label": ["a", "b"]},
    "tokens": {"tokens": ["the", "cat", "sat"], "tags": ["O", "B-X", "O"]},
    "question_answering": {"question": "who", "context": "cat sat", "answers": {"text": ["cat"], "answer_start": [0]}},
    "multiple_choice": {"text": "the cat", "choices": ["sat", "ran"], "label": 1},
}


@pytest.mark.parametrize("task", chosen(OF_TASKS, ["question_answering"]))
def test_every_task_has_a_dry_run(folder: Path, tmp_path: Path, task: str) -> None:
    files = files_of(tmp_path, [OF_TASKS[task]] * 12)
    model = str(folder / "model") if task == "multiple_choice" else "builtin/tiny"
    found = foreseen(settings(folder, task=task, **files, **{"model.name": model, "model.max_length": 96}))
    assert found["memory"]["parts"]["activations"] > 0
    assert found["data"]["rows"] >= 12


def test_the_command_trains_and_writes_nothing(
    folder: Path, tmp_path: Path, ran: Ran, refuses: Refuses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("secure_fed.runs.run.run", lambda *_, **__: pytest.fail("it trains"))
    files = [f"model.name={folder / 'model'}", *(f"data.{split}={folder / split}.jsonl" for split in ("train", "test"))]
    private = ["privacy.unit=client", "privacy.noise_multiplier=0.5", "privacy.delta=1e-3", "federation.clients=3"]
    given = [part for setting in (*files, *private) for part in ("--set", setting)]
    status, shown, _ = ran("train", *given, "--dry-run")
    assert (status, "dry run" in shown) == (0, True)
    memory = json.loads(ran("train", *given, "--dry-run", "--json")[1])["memory"]
    assert memory["peak"] >= sum(memory["parts"].values())
    assert not [*tmp_path.iterdir()]
    refuses("train", *given, "--dry-run", "--resume", "--out", "run")


def test_a_shared_ledger_stays_as_it_is_and_a_plan_beyond_it_is_refused(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "ledger.sqlite"
    Ledger.create(path, data_set="texts", epsilon=3.0, delta=1e-2)
    own = {"privacy.ledger": str(path), "privacy.ledger_heads": str(tmp_path / "heads.sqlite")}
    config = settings(folder, unit="client", task="classification", **own)
    with_room = config.replace({("privacy", "noise_multiplier"): 20.0})
    before = path.read_bytes()
    found = foreseen(with_room)
    assert str(path) in found["privacy"]["words"][-1]
    assert path.read_bytes() == before
    with pytest.raises(BudgetExhausted):
        foreseen(config)
    assert path.read_bytes() == before


@pytest.mark.parametrize("method", ["fedlora", "head"])  # `head` reads each text once
def test_a_folder_without_weights_is_enough(folder: Path, method: str) -> None:
    own: dict[str, Any] = {"task": "classification", "model.pooling": "mean"}
    with_weights = foreseen(settings(folder, method, **own))["memory"]["parts"]
    without = foreseen(settings(folder, method, **own, **{"model.name": str(folder / "shapes")}))["memory"]["parts"]
    assert without | {"python, libraries and data": 0} == with_weights | {"python, libraries and data": 0}


def test_a_run_that_would_be_refused_is_refused(folder: Path) -> None:
    with refused(ConfigError, "privacy.delta"):
        foreseen(settings(folder, unit="client", task="classification", **{"privacy.delta": 0.9}))
