"""A federation of the user's own objects."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
)

from secure_fed import Federation, RunConfig
from secure_fed.errors import ConfigError, DataError, MethodError, ModelError, RunDirectoryError
from secure_fed.methods.method import State
from secure_fed.report.terminal import rows
from secure_fed.rounds.transport import Recording
from secure_fed.runs.evaluation import evaluated
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Tensors
from tests.cells import every
from tests.secure_fed import private_toys, small_models, toys

# Data of every kind.


def regression_collate(items: Sequence[tuple[Tensor, float]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def regression_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return (model(x)[:, 0] - y).square()


def regression_metrics(model: nn.Module, batches: Any) -> dict[str, float]:
    errors = torch.cat([regression_loss(model, batch) for batch in batches])
    return {"rmse": math.sqrt(float(errors.mean()))}


def test_tuples_with_a_task_of_ones_own() -> None:
    def items(seed: int, count: int) -> list[tuple[Tensor, float]]:
        x = torch.randn(count, 6, generator=torch.Generator().manual_seed(seed))
        return [(row, float(row.sum())) for row in x]

    result = Federation(
        toys.config({"federation.rounds": 8, "training.steps": 5}),
        model=toys.model(),
        train=[items(client, 20) for client in range(3)],
        test=items(9, 30),
        collate=regression_collate,
        loss=regression_loss,
        metrics=regression_metrics,
    ).run()
    assert result.records[-1]["rmse"] < 0.7 * result.records[0]["rmse"]
    assert result.summary["metrics"] == {"rmse": result.records[-1]["rmse"]}
    assert result.summary["accuracy"] is None
    assert result.summary["model"] == "Toy"
    assert result.summary["data"] == "given in Python"


UNPROTECTED_OR_NOT = [{}, {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0}]


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


@pytest.mark.parametrize("settings", UNPROTECTED_OR_NOT)
def test_a_torch_data_set_is_as_good_as_a_list(settings: dict[str, Any]) -> None:
    sizes = (5, 8, 11)
    sets = [Squares(client + 1, size) for client, size in enumerate(sizes)]
    theirs = private_toys.federation(settings, seed=0, train=sets, test=Squares(99, 20)).run()
    ours = private_toys.federation(settings, seed=0, sizes=sizes).run()
    assert toys.same(theirs.state.tensors, ours.state.tensors)
    assert toys.without_time(theirs.records) == toys.without_time(ours.records)


@pytest.mark.parametrize("settings", UNPROTECTED_OR_NOT)
def test_a_tensor_data_set_with_collate_and_loss(settings: dict[str, Any]) -> None:
    def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def tensor_set(seed: int, count: int) -> TensorDataset:
        examples = toys.examples(seed, count)
        labels = torch.tensor([example["labels"] for example in examples])
        return TensorDataset(torch.stack([example["x"] for example in examples]), labels)

    sets = [tensor_set(client + 1, size) for client, size in enumerate((5, 8, 11))]
    result = private_toys.federation(
        settings,
        seed=0,
        train=sets,
        test=tensor_set(99, 20),
        loss=loss,
        metrics=lambda model, batches: {"batches": float(len(list(batches)))},
    ).run()
    ours = private_toys.federation(settings, seed=0).run()
    assert toys.same(result.state.tensors, ours.state.tensors)


def texts(seed: int, count: int) -> list[dict[str, Any]]:
    """Token ids of unequal lengths; the label says whether a certain token occurs."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(5, 40, (int(torch.randint(3, 12, (), generator=generator)),), generator=generator).tolist()
        rows.append({"input_ids": [2, *([4] if number % 2 else []), *ids], "labels": number % 2})
    return rows


def test_a_transformer_and_tokenised_items_need_nothing_else() -> None:
    federation = Federation(
        toys.config({"method.modules_to_save": [], "federation.rounds": 2}),
        model=small_models.make("bert"),
        train=[texts(1, 9), texts(2, 12)],
        test=texts(3, 10),
    )
    result = federation.run()
    assert {"accuracy", "macro_f1", "loss"} <= set(result.records[-1])
    trained = [name for name in result.state.tensors if "lora" not in name]
    assert trained == ["bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]
    assert all(parameter.requires_grad == (name in result.state.tensors)
               for name, parameter in federation.assembly.problem.model.named_parameters())  # fmt: skip


_SMALL = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


@every(
    ("model", "saved", "expected"),
    [
        (lambda: LlamaForCausalLM(LlamaConfig(**_SMALL)), [], set()),
        (lambda: LlamaForCausalLM(LlamaConfig(**_SMALL)), ["lm_head"], {"lm_head.weight"}),
        (lambda: BertForMaskedLM(BertConfig(**_SMALL)), [], set()),
        (lambda: LlamaForSequenceClassification(LlamaConfig(**_SMALL, pad_token_id=0)), [], {"score.weight"}),
    ],
)
def test_a_language_model_keeps_its_output_layer(
    model: Callable[[], nn.Module], saved: Sequence[str], expected: set[str]
) -> None:
    """As where the configuration names the model, though this layer has embeddings of its own and is large."""

    def of_each(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scores: Tensor = model(input_ids=batch["input_ids"]).logits
        return scores.flatten(1).mean(1)

    federation = Federation(
        toys.config({"method.modules_to_save": saved, "federation.rounds": 1}),
        model=model(),
        train=[texts(1, 4), texts(2, 4)],
        test=texts(3, 4),
        loss=of_each,
        metrics=lambda model, batches: {"batches": float(len(list(batches)))},
    )
    tensors = federation.run().state.tensors
    assert {name for name in tensors if "lora" not in name} == expected


def test_the_trained_model_is_there_to_use() -> None:
    federation = toys.federation()
    result = federation.run()
    model = federation.load(result.state).eval()
    labels = torch.tensor([item["labels"] for item in federation.assembly.problem.test])
    guess = model(torch.stack([item["x"] for item in federation.assembly.problem.test])).argmax(1)
    assert result.summary["accuracy"] == pytest.approx(float((guess == labels).double().mean()))


# Callbacks and measurements.


class Listener:
    """Records the calls of a callback, and checks that the run directory already holds the round or the result."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.news: list[tuple[dict[str, Any], State]] = []
        self.result: Result | None = None

    def on_round_end(self, record: dict[str, Any], state: State) -> None:
        lines = (self.path / "metrics.jsonl").read_text().splitlines()
        assert len(lines) == record["round"] == state.round
        self.news.append((record, state))

    def on_end(self, result: Result) -> None:
        assert (self.path / "result.json").exists()
        self.result = result


def test_callbacks_hear_of_a_round_once_it_is_safe(tmp_path: Path) -> None:
    class OnlyRounds:
        rounds = 0

        def on_round_end(self, record: dict[str, Any], state: State) -> None:
            self.rounds += 1

    listener, half = Listener(tmp_path / "run"), OnlyRounds()
    result = toys.federation(callbacks=[listener, half]).run(tmp_path / "run")
    assert [record for record, _ in listener.news] == result.records
    assert toys.same(listener.news[-1][1].tensors, result.state.tensors)
    assert listener.result is result
    assert half.rounds == 3
    assert result.run_dir == tmp_path / "run"


def test_clients_are_measured_on_request() -> None:
    assert "clients_accuracy" not in toys.federation().run().records[-1]
    federation = toys.federation({"evaluation.per_client": True, "evaluation.every": 2})
    records = federation.run().records
    assert ["clients_accuracy" in record for record in records] == [False, True, True]
    model = federation.assembly.objective.model.eval()
    right = []
    for client in federation.assembly.clients:
        x, labels = (torch.stack([torch.as_tensor(item[key]) for item in client.examples]) for key in ("x", "labels"))
        right.append(float((model(x).argmax(1) == labels).double().mean()))
    assert records[-1]["clients_accuracy"] == pytest.approx({"mean": sum(right) / 3, "worst_decile": min(right)})


def test_comparing_clients_needs_an_accuracy() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.per_client compares clients by 'accuracy'"):
        toys.federation({"evaluation.per_client": True}, metrics=lambda model, batches: {"error": 1.0}).run()


# Personal tensors, which stay with their clients.


@pytest.mark.parametrize("method", toys.METHODS)
def test_a_personal_head_never_travels_and_differs_between_clients(method: str, tmp_path: Path) -> None:
    settings = {"method.name": method, "method.personal": ["classifier"], "training.steps": 3}
    federation = toys.federation(settings)
    recording = Recording(federation.assembly.transport)
    federation.assembly = replace(federation.assembly, transport=recording)
    result = federation.run(tmp_path / "run")
    for request, reply in recording.exchanges:
        travelled = [*request.tensors, *reply.contribution, *(name for mean in request.means.values() for name in mean)]
        assert travelled
        assert not [name for name in travelled if name.startswith("classifier")]
    heads = [client.personal for client in federation.assembly.clients]
    assert all(set(head) == {"classifier.bias", "classifier.weight"} for head in heads)
    assert len({head.to_bytes() for head in heads}) == 3
    for name in heads[0]:
        assert torch.equal(result.state.tensors.tensor(name), federation.assembly.initial.tensors.tensor(name))
    again = toys.federation(settings)
    again.run(tmp_path / "run", resume=True)
    assert [client.personal.to_bytes() for client in again.assembly.clients] == [head.to_bytes() for head in heads]


def test_a_client_is_measured_with_its_own_head() -> None:
    """Each client numbers the labels differently, so only a personal head can be right."""

    def shifted(client: int) -> list[dict[str, Any]]:
        return [item | {"labels": (item["labels"] + client) % 3} for item in toys.examples(client + 1, 40)]

    settings = {"evaluation.per_client": True, "federation.rounds": 15, "training.steps": 5, "evaluation.every": 15}
    train = [shifted(client) for client in range(3)]
    accuracy = {
        personal: toys.federation({**settings, "method.personal": [personal] if personal else []}, train=train)
        .run()
        .records[-1]["clients_accuracy"]["mean"]
        for personal in ("", "classifier")
    }
    assert accuracy["classifier"] > accuracy[""] + 0.2


def test_the_test_set_measures_own_models_where_heads_stay_with_clients() -> None:
    """The shared head is untrained. Under privacy it is measured all the same, since no personal model is released."""
    settings = {"method.personal": ["classifier"], "federation.rounds": 8, "training.steps": 5}
    federation = toys.federation(settings)
    result = federation.run()
    test = federation.assembly.problem.test
    x, labels = (torch.stack([torch.as_tensor(item[key]) for item in test]) for key in ("x", "labels"))

    def right(tensors: Tensors) -> float:
        return float((federation.assembly.objective.load(tensors).eval()(x).argmax(1) == labels).double().mean())

    own = [right(result.state.tensors | client.personal) for client in federation.assembly.clients]
    assert result.records[-1]["accuracy"] == pytest.approx(sum(own) / 3)
    assert abs(sum(own) / 3 - right(result.state.tensors)) > 0.05
    assert any("A client's own model" in value for _, value in rows(result.whole))

    private = toys.federation(
        {**settings, "privacy.unit": "client", "privacy.noise_multiplier": 1.0, "privacy.delta": 0.1}
    )
    state = private.run().state
    assert evaluated(private.assembly, state)["accuracy"] == pytest.approx(right(state.tensors))


# Refused objects and settings.


@pytest.mark.parametrize("missing", ["model", "train", "test"])
def test_a_missing_part_is_named(missing: str) -> None:
    with pytest.raises(ConfigError, match=rf"but not {missing}; give model, train and test"):
        toys.federation(**{missing: None})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"model": "builtin/tiny"}, "model is a str; give a torch module"),
        ({"callbacks": [print]}, "a callback is a builtin_function_or_method without any of on_"),
        ({"collate": 3}, "collate is a int; give a function"),
        ({"callbacks": "abc"}, "callbacks is a str; give a list of objects"),
        ({"callbacks": object()}, "callbacks is a object; give a list of objects"),
    ],
)
def test_an_object_of_another_kind_is_named(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        toys.federation(**given)


def test_trials_may_read_a_given_test_set_and_no_rows_held_out_of_private_ones(
    small_model: Path, small_data: Path
) -> None:
    assert len(toys.federation().assembly.objective.public) == 20
    own = [f"model.name={small_model}", f"data.train={small_data / 'train.jsonl'}", "federation.clients=4"]
    assert len(Federation(RunConfig.load(None, own)).assembly.objective.public) == 0


def test_one_data_set_is_no_list_of_clients() -> None:
    rows = TensorDataset(torch.zeros(9, 6), torch.zeros(9, dtype=torch.long))
    with pytest.raises(ConfigError, match="train is one TensorDataset; give a list with one data set per client"):
        toys.federation(train=rows)


def test_an_empty_client_is_named() -> None:
    with pytest.raises(DataError, match="client 1 of the 3 in train has no examples; leave it out"):
        toys.federation(sizes=(4, 0, 3))


@pytest.mark.parametrize(
    "nothing",
    [{"input_ids": []}, {"input_ids": torch.ones(0)}, {"input_ids": [1, 2], "attention_mask": torch.zeros(2)}],
    ids=["list", "tensor", "masked"],
)
def test_an_example_without_tokens_is_named(nothing: dict[str, Any]) -> None:
    text = {"input_ids": [1, 2], "attention_mask": [1, 1], "labels": 0}
    with pytest.raises(DataError, match="example 1 of client 1") as refused:
        Federation(toys.config(), model=small_models.bert(), train=[[text], [text, text | nothing]], test=[text])
    assert refused.value.setting == "train"
    Federation(toys.config(), model=small_models.bert(), train=[[text], [text, text]], test=[text])


@pytest.mark.parametrize(("part", "fact"), [({"train": []}, "0 clients"), ({"test": []}, "0 test examples")])
def test_nobody_and_nothing_are_refused(part: dict[str, Any], fact: str) -> None:
    with pytest.raises(DataError, match=fact):
        toys.federation(**part)


def test_settings_that_contradict_the_objects_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"federation\.clients is 4, but train holds 3 clients"):
        toys.federation({"federation.clients": 4, "federation.cohort": 2})
    with pytest.raises(ConfigError, match=r"federation\.cohort is 9, more than the 3 clients"):
        toys.federation({"federation.cohort": 9})


def test_a_head_that_is_not_there_is_refused() -> None:
    with pytest.raises(MethodError, match=r"method\.modules_to_save names 'head', but the model has no such module"):
        toys.federation({"method.modules_to_save": ["head"]})


def test_a_loss_of_torch_and_a_layer_with_statistics_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"loss is CrossEntropyLoss"):
        toys.federation(loss=nn.CrossEntropyLoss())
    model = toys.model()
    model.dropout = nn.BatchNorm1d(8)  # type: ignore[assignment]
    with pytest.raises(ModelError, match="layer dropout of the model is BatchNorm1d"):
        toys.federation(model=model)


def test_resuming_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="set out"):
        toys.federation().run(resume=True)
    toys.federation().run(tmp_path / "run")
    with pytest.raises(RunDirectoryError, match="already holds a run"):
        toys.federation().run(tmp_path / "run")


def test_resuming_what_never_started_starts(tmp_path: Path) -> None:
    """A run killed before its first file can be resumed too: in Python, the caller gives all the settings anyway."""
    resumed = toys.federation().run(tmp_path / "run", resume=True)
    assert toys.same(resumed.state.tensors, toys.federation().run().state.tensors)


def test_a_default_configuration_may_be_left_out() -> None:
    assert RunConfig().federation.rounds == 20
    federation = Federation(model=small_models.make("bert"), train=[texts(1, 9)], test=texts(2, 5))
    settled = {"lr": 5e-3, "batch_size": 16, "lr_schedule": "stable_decay", "head_factor": 1.0}
    steps = {("training", name): value for name, value in settled.items()}
    server = {"server_optimizer": "mean", "server_lr": 1.0, "average_last": 1}
    chosen = steps | {("federation", name): value for name, value in server.items()}
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
