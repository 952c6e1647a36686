"""A federation of the user's own objects: data of every kind, callbacks, personal tensors, many clients, and refusals."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from secure_fed import Federation, RunConfig
from secure_fed.errors import ConfigError, DataError, ModelError, RunDirectoryError, TrainingError
from secure_fed.learning import problem
from secure_fed.methods.method import State
from secure_fed.report.terminal import rows
from secure_fed.rounds.client import Registered
from secure_fed.runs.evaluation import evaluated
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.contracts import runs
from tests.contracts.runs import KilledAfter, KilledError
from tests.golden import refused
from tests.secure_fed import private_toys, small_models, toys

# Data of every kind.


def test_tuples_with_a_task_of_ones_own() -> None:
    def items(seed: int, count: int) -> list[tuple[Tensor, float]]:
        return [(item["x"], float(item["x"].sum())) for item in toys.examples(seed, count)]

    def collate(items: Sequence[tuple[Tensor, float]]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (model(x)[:, 0] - y).square()

    def metrics(model: nn.Module, batches: Any) -> dict[str, float]:
        return {"rmse": math.sqrt(float(torch.cat([loss(model, batch) for batch in batches]).mean()))}

    own: dict[str, Any] = {"collate": collate, "loss": loss, "metrics": metrics}
    settings = {"federation.rounds": 3, "training.steps": 5, "training.lr": 0.2}
    result = toys.federation(settings, train=[items(client, 20) for client in range(3)], test=items(9, 30), **own).run()
    assert result.records[-1]["rmse"] < 0.7 * result.records[0]["rmse"]
    assert result.summary["metrics"] == {"rmse": result.records[-1]["rmse"]}
    assert result.summary["accuracy"] is None
    assert result.summary["model"] == "Toy"
    assert result.summary["data"] == "given in Python"


class Squares(Dataset[dict[str, Any]]):
    """A data set with only a length and items, without a list's other methods."""

    def __init__(self, seed: int, count: int) -> None:
        self.examples = toys.examples(seed, count)

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.examples[index]


@pytest.mark.parametrize("unit", chosen(["none", "example"], ["none"]))
def test_data_sets_of_torch_are_as_good_as_lists(unit: str) -> None:
    settings = {} if unit == "none" else {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0}

    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def tensors(seed: int, count: int) -> TensorDataset:
        x, labels = zip(*(item.values() for item in toys.examples(seed, count)), strict=True)
        return TensorDataset(torch.stack(x), torch.tensor(labels))

    def run(kind: Callable[[int, int], Any], **own: Any) -> Result:
        train = [kind(client + 1, size) for client, size in enumerate((5, 8, 11))]
        return private_toys.federation(settings, seed=0, train=train, test=kind(99, 20), **own).run()

    lists, items = private_toys.federation(settings, seed=0).run(), run(Squares)
    of_tensors = run(tensors, loss=loss, metrics=lambda model, batches: {"batches": float(len(list(batches)))})
    assert toys.same(items.state.tensors, lists.state.tensors)
    assert toys.same(of_tensors.state.tensors, lists.state.tensors)
    assert toys.without_time(items.records) == toys.without_time(lists.records)


_SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
_SMALL |= {"num_attention_heads": 2, "intermediate_size": 24}

BERT_HEAD = ("bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight")


@every(
    ("model", "saved", "expected"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**_SMALL)), [], set()),
        (lambda: LlamaForCausalLM(LlamaConfig(**_SMALL)), ["lm_head"], {"lm_head.weight"}),
        (lambda: BertForMaskedLM(BertConfig(**_SMALL)), [], set()),
        (lambda: LlamaForSequenceClassification(LlamaConfig(**_SMALL, pad_token_id=0)), [], {"score.weight"}),
        (small_models.bert, [], {*BERT_HEAD}),
    ],
)
def test_the_head_of_a_given_model_trains_and_a_language_model_keeps_its_output_layer(
    model: Callable[[], nn.Module], saved: Sequence[str], expected: set[str]
) -> None:
    """As where the configuration names the model, though this layer has embeddings of its own and is large."""
    config, data = toys.config({"method.modules_to_save": saved}), runs.examples(1, 4)
    assembly = Federation(config, model=model(), train=[data, data], test=data).assembly
    tensors = assembly.initial.tensors
    assert {name for name in tensors if "lora" not in name} == expected
    assert {name for name, one in assembly.problem.model.named_parameters() if one.requires_grad} == {*tensors}


def accuracy(model: nn.Module, items: Sequence[Any]) -> float:
    x, labels = (torch.stack([torch.as_tensor(item[key]) for item in items]) for key in ("x", "labels"))
    return float((model.eval()(x).argmax(1) == labels).double().mean())


# Callbacks and measurements.


def test_callbacks_hear_of_a_round_once_it_is_safe(tmp_path: Path) -> None:
    heard: list[tuple[dict[str, Any], State]] = []
    ended: list[Result] = []

    def on_round_end(record: dict[str, Any], state: State) -> None:
        lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == record["round"] == state.round
        heard.append((record, state))

    def on_end(result: Result) -> None:
        assert (tmp_path / "run" / "result.json").exists()
        ended.append(result)

    both, one = SimpleNamespace(on_round_end=on_round_end, on_end=on_end), SimpleNamespace(on_end=on_end)
    result = toys.federation(callbacks=[both, one]).run(tmp_path / "run")
    assert [record for record, _ in heard] == result.records
    assert toys.same(heard[-1][1].tensors, result.state.tensors)
    assert [found is result for found in ended] == [True, True]
    assert result.run_dir == tmp_path / "run"


def test_clients_are_measured_on_request() -> None:
    assert "clients_accuracy" not in toys.federation().run().records[-1]
    federation = toys.federation({"evaluation.per_client": True, "evaluation.every": 2})
    records = federation.run().records
    assert ["clients_accuracy" in record for record in records] == [False, True, True]
    model = federation.assembly.objective.model
    right = [accuracy(model, client.examples) for client in federation.assembly.clients]
    assert records[-1]["clients_accuracy"] == pytest.approx({"mean": sum(right) / 3, "worst_decile": min(right)})


# Personal tensors, which stay with their clients.


def test_own_models_are_measured_where_heads_stay_with_clients() -> None:
    """On the test set and on their clients' data. The shared head is untrained: it is measured under privacy alone, where no
    personal model is released.
    """
    settings = {"method.personal": ["classifier"], "federation.rounds": 2, "training.steps": 5, "training.lr": 0.2}
    federation = toys.federation({**settings, "evaluation.per_client": True})
    result = federation.run()

    def right(tensors: Tensors, items: Sequence[Any]) -> float:
        return accuracy(federation.assembly.objective.load(tensors), items)

    state, test = result.state.tensors, federation.assembly.problem.test
    clients = federation.assembly.clients
    own, at_home = ([right(state | one.personal, where or one.examples) for one in clients] for where in (test, ()))
    assert result.records[-1]["accuracy"] == pytest.approx(sum(own) / 3)
    assert abs(sum(own) / 3 - right(state, test)) > 0.05
    assert result.records[-1]["clients_accuracy"] == pytest.approx(
        {"mean": sum(at_home) / 3, "worst_decile": min(at_home)}
    )
    assert any("A client's own model" in value for _, value in rows(result.whole))

    private = toys.federation({**settings, **private_toys.NOISE, "privacy.delta": 0.1})
    released = private.run().state
    assert evaluated(private.assembly, released)["accuracy"] == pytest.approx(right(released.tensors, test))


# Objects that behave as few do.


@every("value", [np.float32(0.5), np.int64(1), torch.tensor(0.5), torch.tensor(math.nan), math.inf])
def test_any_kind_of_number_is_a_metric_and_none_where_it_is_not_finite(value: Any) -> None:
    settings = {"federation.rounds": 1, "evaluation.per_client": True}
    result = toys.federation(settings, metrics=lambda model, batches: {"accuracy": value}).run()
    expected = float(value) if math.isfinite(value) else None
    assert result.summary["accuracy"] == result.records[0]["accuracy"] == expected
    assert result.records[0]["clients_accuracy"] == {"mean": expected, "worst_decile": expected}


class Counting(toys.Toy):
    """A model whose output depends on the number of calls in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Tensor
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return super().forward(x) * (1 + self.calls)


def test_what_a_forward_pass_does_to_buffers_reaches_no_other_training() -> None:
    federation = toys.federation({"federation.rounds": 1}, model=Counting())
    first, again = federation.run(), federation.run()
    assert first.records[-1]["loss"] == again.records[-1]["loss"]
    assert all(torch.equal(first.state.tensors.tensor(n), again.state.tensors.tensor(n)) for n in first.state.tensors)


@pytest.mark.nightly
def test_a_user_may_change_the_model_between_two_runs() -> None:
    federation = toys.federation({**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0, "federation.rounds": 1})
    federation.run()
    next(iter(federation.assembly.objective.model.parameters())).data.add_(0.1)
    assert federation.run().state.round > 0


def test_trials_may_read_a_given_test_set_and_no_rows_held_out_of_private_ones(
    small_model: Path, small_data: Path
) -> None:
    assert len(toys.federation().assembly.objective.public) == 20
    own = [f"model.name={small_model}", f"data.train={small_data / 'train.jsonl'}", "federation.clients=4"]
    assert len(Federation(RunConfig.load(None, own)).assembly.objective.public) == 0


def test_a_default_configuration_may_be_left_out() -> None:
    assert RunConfig().federation.rounds == 20
    federation = Federation(model=small_models.make("bert"), train=[runs.examples(1, 9)], test=runs.examples(2, 5))
    settled = {"lr": 5e-3, "batch_size": 16, "lr_schedule": "stable_decay", "head_factor": 1.0}
    steps = {("training", name): value for name, value in settled.items()}
    server = {"server_optimizer": "mean", "server_lr": 1.0, "average_last": 1}
    chosen = steps | {("federation", name): value for name, value in server.items()} | {("method", "name"): "fra_lora"}
    assert federation.config == RunConfig().replace(chosen)
    assert len(federation.assembly.clients) == 1


def test_parameters_that_a_user_froze_are_named_since_the_method_decides() -> None:
    model = toys.model()
    assert toys.federation(model=model).notes == []
    frozen = toys.model()
    name, parameter = next(iter(frozen.named_parameters()))
    parameter.requires_grad_(False)
    (note,) = toys.federation({"evaluation.audit_fraction": 0.0}, model=frozen).notes
    assert note.startswith(
        f"1 parameters of the model are frozen, {name} among them, and this has no effect: method.name"
    )


# Refused objects and settings.

DATA = toys.examples(1, 6)
PAIRS = [(item["x"], item["labels"]) for item in DATA]
ONE_EXAMPLE = {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0}
TEXT = {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": 0}


def with_statistics() -> nn.Module:
    model = toys.model()
    model.dropout = nn.BatchNorm1d(8)  # type: ignore[assignment]
    return model


# What toys.federation is given, the error and its setting.
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str | None]] = {
    **{f"no {name}": ({name: None}, ConfigError, name) for name in ("model", "train", "test")},
    "a model's name": ({"model": "builtin/tiny"}, ConfigError, "model"),
    "a number for a function": ({"collate": 3}, ConfigError, "collate"),
    "a loss of torch": ({"loss": nn.CrossEntropyLoss()}, ConfigError, "loss"),
    "a layer with statistics": ({"model": with_statistics()}, ModelError, None),
    "a function for a callback": ({"callbacks": [print]}, ConfigError, "callbacks"),
    "a text for callbacks": ({"callbacks": "abc"}, ConfigError, "callbacks"),
    "an object for callbacks": ({"callbacks": object()}, ConfigError, "callbacks"),
    "one data set": ({"train": TensorDataset(torch.zeros(9, 6), torch.zeros(9))}, ConfigError, "train"),
    "clients by name": ({"train": {"clinic": DATA}}, ConfigError, "train"),
    "a generator of clients": ({"train": (data for data in [DATA])}, ConfigError, "train"),
    "examples for clients": ({"train": DATA}, ConfigError, "train"),
    "an iterator for a client": ({"train": [DATA, iter(DATA)]}, ConfigError, "train"),
    "a generator of test examples": ({"test": (item for item in DATA)}, ConfigError, "test"),
    "a loader": ({"test": DataLoader(DATA)}, ConfigError, "test"),  # type: ignore[arg-type]
    "nobody": ({"train": []}, DataError, None),
    "nothing": ({"test": []}, DataError, None),
    "an example twice": ({"settings": ONE_EXAMPLE, "train": [DATA, Subset(DATA, [0, 1, 0])]}, DataError, None),  # type: ignore[arg-type]
    "an empty client": ({"sizes": (4, 0, 3)}, DataError, None),
    "tuples without a loss": ({"train": [PAIRS], "test": PAIRS}, ConfigError, "loss"),
    "tuples without metrics": (
        {"train": [PAIRS], "test": PAIRS, "loss": lambda model, batch: model(batch[0]).sum(1)},
        ConfigError,
        "metrics",
    ),
    "more clients": (
        {"settings": {"federation.clients": 4, "federation.cohort": 2}},
        ConfigError,
        "federation.clients",
    ),
    "a larger cohort": ({"settings": {"federation.cohort": 9}}, ConfigError, "federation.cohort"),
    **{
        name: ({"settings": {name: value}}, ConfigError, name)
        for name, value in (
            ("model.name", "org/model"),
            ("model.dtype", "bfloat16"),
            ("data.alpha", 0.5),
            ("data.examples", 9),
        )
    },
    "clients compared by no accuracy": (
        {"settings": {"evaluation.per_client": True}, "metrics": lambda *given: {"error": 1.0}},
        ConfigError,
        "evaluation.per_client",
    ),
    "a name of the record": ({"metrics": lambda *given: {"accuracy": 0.5, "bytes_up": 9}}, ConfigError, "metrics"),
    **{
        f"metrics that are {name}": ({"metrics": lambda *given, value=value: value}, ConfigError, "metrics")
        for name, value in {
            "none": None,
            "a list": [0.5],
            "a word": {"accuracy": "high"},
            "a tensor": {"accuracy": torch.zeros(2)},
        }.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    given, kind, setting = REFUSED[case]
    with refused(kind, setting):
        toys.federation(**given).run()


def test_a_configuration_is_a_run_config() -> None:
    with refused(ConfigError, "config"):
        Federation({"federation": {"rounds": 1}})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "nothing",
    [{"input_ids": []}, {"input_ids": torch.ones(0)}, {"input_ids": [1, 2], "attention_mask": torch.zeros(2)}],
    ids=["list", "tensor", "masked"],
)
def test_an_example_without_tokens_is_named(nothing: dict[str, Any]) -> None:
    with refused(DataError, "train"):
        Federation(toys.config(), model=small_models.bert(), train=[[TEXT], [TEXT, TEXT | nothing]], test=[TEXT])
    Federation(toys.config(), model=small_models.bert(), train=[[TEXT], [TEXT, TEXT]], test=[TEXT])


@pytest.mark.parametrize(("where", "label"), [("train", 3), ("test", -1)])
def test_a_label_that_is_no_class_of_the_model_is_refused(where: str, label: int) -> None:
    right = [{"input_ids": [5, 6, 7], "labels": index % 3} for index in range(4)]
    wrong = [*right[:3], {"input_ids": [5, 6, 7], "labels": label}]
    data = {"train": [right], "test": right} | {where: [wrong] if where == "train" else wrong}
    with refused(DataError):
        Federation(RunConfig(), model=small_models.make("bert"), **data).run()


def test_a_directory_is_needed_to_resume() -> None:
    with refused(RunDirectoryError):
        toys.federation().run(resume=True)


def test_a_state_that_is_not_finite_is_never_saved(tmp_path: Path) -> None:
    with refused(TrainingError):
        toys.federation({"federation.server_lr": 1e39}).run(tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.safetensors").exists()


# Federations of many registered clients, of which only the drawn ones are built.

CLIENTS = 40


class OnDemand(Sequence[Any]):
    """Builds a client's examples on access, and notes the client's index."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return CLIENTS

    def __getitem__(self, index: Any) -> Any:
        self.asked.append(index)
        return toys.examples(index, 2 + index % 3)


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "MANY", CLIENTS)


def of_many(unit: str, **more: Any) -> dict[str, Any]:
    private = {"privacy.unit": unit, "privacy.noise_multiplier": 1.0, "privacy.delta": 1e-6, "evaluation.dummies": 0}
    usual = {"federation.cohort": 4, "evaluation.audit_fraction": 0.0}
    return {**usual, **(private if unit != "none" else {}), **more}


def test_results_are_those_of_the_same_clients_in_a_list() -> None:
    whole = [toys.examples(index, 2 + index % 3) for index in range(CLIENTS)]
    results = [toys.federation(of_many("none"), train=train).run() for train in (OnDemand(), whole)]
    assert toys.same(results[0].state.tensors, results[1].state.tensors)
    assert toys.without_time(results[0].records) == toys.without_time(results[1].records)


def test_units_to_hold_out_are_not_to_be_had_of_clients_that_do_not_exist_yet() -> None:
    with refused(ConfigError, "evaluation.audit_fraction"):
        toys.federation({"federation.cohort": 4, "evaluation.audit_fraction": 0.5}, train=OnDemand())
    with refused(ConfigError, "evaluation.canaries"):
        toys.federation({"federation.cohort": 4, "evaluation.canaries": "mislabelled"}, train=OnDemand())


@pytest.mark.parametrize("unit", ["none", "client"])
def test_only_drawn_clients_are_asked_for_and_none_is_kept(unit: str) -> None:
    train = OnDemand()
    federation = toys.federation(of_many(unit), train=train)
    assert set(train.asked) <= {0}  # the first client's examples may be inspected at the start
    train.asked.clear()
    federation.run()
    clients = federation.assembly.clients
    assert isinstance(clients, Registered)
    assert len(clients) == CLIENTS
    assert clients.made == []
    assert len(set(train.asked)) < CLIENTS
    if unit == "none":
        assert sorted(train.asked) == sorted(
            one for round_ in range(3) for one in federation.assembly.server.draw(round_)
        )


def test_personal_tensors_stay_with_their_client_through_a_kill(tmp_path: Path) -> None:
    chosen = of_many("none", **{"method.personal": ["classifier"], "federation.rounds": 3})
    whole, resumed = (toys.federation(chosen, train=OnDemand()) for _ in range(2))
    kept_of_all = whole.run().state
    with pytest.raises(KilledError):
        toys.federation(chosen, train=OnDemand(), callbacks=[KilledAfter(2)]).run(tmp_path / "run")
    assert toys.same(resumed.run(tmp_path / "run", resume=True).state.tensors, kept_of_all.tensors)
    own, other = resumed.assembly.clients, whole.assembly.clients
    assert isinstance(own, Registered)
    assert isinstance(other, Registered)
    assert [client.index for client in own.made] == [client.index for client in other.made] != []
    assert all(toys.same(own[one.index].personal, one.personal) for one in other.made)
