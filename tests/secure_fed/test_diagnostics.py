"""The diagnostics' numbers, compared with loops that do not use the package, and diagnostics of whole runs: measured if
switched on, checked by hand where possible, the same after an interruption.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from secure_fed.config import EvaluationConfig, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods.method import State
from secure_fed.rounds import diagnostics
from secure_fed.rounds.client import Client
from secure_fed.rounds.diagnostics import (
    Discrepancy,
    Variation,
    Weights,
    features,
    linear_cka,
    of_columns,
    of_wholes,
)
from secure_fed.runs.run import Result
from secure_fed.runs.store import read_records
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import toys


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_columns_of_known_angles_of_zeros_and_of_tensors_that_are_no_matrices() -> None:
    before = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    after = torch.tensor([[3.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # longer, turned by 90 degrees, reversed
    assert of_columns(before, after) == pytest.approx((2 / 3, (0 + 1 + 2) / 3))
    zeros = torch.zeros(2, 2)
    assert of_columns(zeros, zeros) == (0.0, 0.0)
    assert of_columns(zeros, torch.eye(2)) == of_columns(torch.eye(2), zeros) == (1.0, 1.0)
    for shape, as_columns in (((6,), (6, 1)), ((3, 2, 4), (3, 8))):
        v, w = random(*shape), random(*shape, seed=1)
        assert of_columns(v, w) == pytest.approx(of_columns(v.reshape(as_columns), w.reshape(as_columns)))


def test_the_angle_to_nothing_and_likeness_to_a_constant_are_no_numbers() -> None:
    magnitude, direction = of_wholes([(torch.zeros(3), torch.ones(3))])
    assert magnitude == pytest.approx(math.sqrt(3))
    assert math.isnan(direction)
    assert math.isnan(linear_cka(random(12, 3), torch.ones(12, 3)))


def test_cka_of_more_features_than_examples_is_the_formulas() -> None:
    x, y = random(5, 9), random(5, 10, seed=1)
    u, v = (one - one.mean(dim=0) for one in (x, y))
    expected = (v.T @ u).norm() ** 2 / (u.T @ u).norm() / (v.T @ v).norm()
    assert linear_cka(x, y) == pytest.approx(float(expected))


class Gives(nn.Module):
    """A model that always returns the given output."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output

    def forward(self, **inputs: Tensor) -> Any:
        return self.output


def seen(output: Any, batch: dict[str, Tensor] | None = None) -> Tensor:
    return features(Gives(output), lambda model, inputs: torch.zeros(len(model(**inputs))), [batch or {}])


class Output(SimpleNamespace):
    def __len__(self) -> int:
        return len(next(iter(vars(self).values())))


def test_features_are_what_leaves_the_model_without_padding() -> None:
    scores = random(6, 3).float()
    assert torch.equal(seen(scores), scores)
    assert torch.equal(seen(Output(logits=scores)), scores)
    assert torch.equal(seen(scores[:, 0]), scores[:, :1])
    scores, mask = random(2, 3, 4).float(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(seen(scores, {"attention_mask": mask}), torch.stack([scores[0, 0], scores[0, 1], scores[1, 0]]))
    assert torch.equal(seen(scores), scores.reshape(6, 4))
    ends = Output(start_logits=scores[..., 0], end_logits=scores[..., 1])
    assert torch.equal(seen(ends, {"attention_mask": mask}), seen(scores[..., :2], {"attention_mask": mask}))
    with refused(ConfigError, "evaluation.diagnostics"):
        seen(Output(hidden=[1]))


def test_features_are_four_an_example_at_most() -> None:
    tokens = torch.arange(300.0).reshape(3, 100, 1)
    found = seen(tokens)
    assert (found.shape, found[0].item(), found[-1].item()) == ((12, 1), 0.0, 299.0)
    assert found[:, 0].diff().min() >= 27


ALL = ["variation", "discrepancy", "drift", "aggregation_error"]
SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "result.schema.json").read_text(encoding="utf-8"))
STEPS = {"training.steps": 4, "training.lr": 0.1}
SIZES = (5, 8, 11)  # of the toys' clients


def asked(*names: str, **more: Any) -> dict[str, Any]:
    return {**STEPS, "evaluation.diagnostics": list(names), **more}


class Kept:
    """A callback that keeps every global state of a run."""

    def __init__(self, federation: Federation) -> None:
        self.states = [federation.assembly.initial]

    def on_round_end(self, record: Mapping[str, Any], state: State) -> None:
        self.states.append(state)


Run = tuple[Result, list[State], list[list[tuple[Tensors, Tensors]]]]


@pytest.fixture(scope="module")
def run() -> Run:
    """A run with all diagnostics: its result, its global states, and each round's clients before and after training."""
    more = {"method.name": "fra_lora", "evaluation.bandwidth": 1.0, "evaluation.target_accuracy": 0.01}
    federation = toys.federation(asked(*ALL, **more, **{"federation.weighting": "examples"}), sizes=SIZES)
    kept = Kept(federation)
    federation.callbacks.append(kept)
    trained: list[tuple[Tensors, Tensors]] = []
    whole = Client._train

    def noted(client: Client, request: Any) -> None:
        whole(client, request)
        trained.append((client._before, client._after))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "_train", noted)
        result = federation.run()
    size = len(federation.assembly.clients)
    return result, kept.states, [trained[i : i + size] for i in range(0, len(trained), size)]


def products(tensors: Tensors) -> list[np.ndarray[Any, Any]]:
    """The products s B A of a toy with alpha 16 and rank 2, so that s = 8."""
    return [8.0 * (tensors.tensor(p.b).double() @ tensors.tensor(p.a).double()).numpy() for p in pairs(tensors)]


def test_the_result_says_the_last_round_and_the_schema_knows_it(run: Run) -> None:
    result, _, _ = run
    told = result.summary["diagnostics"]
    assert {name: told[name] for name in ALL} == {name: result.records[-1][name] for name in ALL}
    assert result.summary["metrics"] == {}
    schema = {**SCHEMA["properties"]["diagnostics"]}
    jsonschema.validate(told, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**told, "surprise": 1}, schema)
    for record in result.records:
        moved = record["bytes_up"] + record["bytes_down"]
        assert record["transfer_seconds"] == pytest.approx(moved / 3 / 1e6)


def test_variation_is_between_the_states_of_two_rounds(run: Run) -> None:
    result, states, _ = run
    for before, after, record in zip(states, states[1:], result.records, strict=False):
        magnitudes, directions = [], []
        for v, w in zip(products(before.tensors), products(after.tensors), strict=True):
            lengths_v, lengths_w = np.linalg.norm(v, axis=0), np.linalg.norm(w, axis=0)
            magnitudes.append(np.abs(lengths_v - lengths_w).mean())
            if before.round:
                directions.append(np.mean(1 - (v * w).sum(axis=0) / (lengths_v * lengths_w)))
        assert record["variation"]["magnitude"] == pytest.approx(np.mean(magnitudes))
        assert record["variation"]["direction"] == pytest.approx(np.mean(directions) if directions else 1.0)
        change = [
            np.abs(
                np.linalg.norm(after.tensors.tensor(p.a).numpy(), axis=0)
                - np.linalg.norm(before.tensors.tensor(p.a).numpy(), axis=0)
            ).mean()
            for p in pairs(before.tensors)
        ]
        assert record["variation"]["magnitude_a"] == pytest.approx(np.mean(change), rel=1e-4)


def test_discrepancy_is_the_mean_over_the_clients_of_a_round(run: Run) -> None:
    result, _, rounds = run
    for record, clients in zip(result.records, rounds, strict=True):
        magnitudes, directions = [], []
        for before, after in clients:
            v, w = (np.concatenate([m.ravel() for m in products(one)]) for one in (before, before | after))
            magnitudes.append(np.linalg.norm(v - w))
            directions.append(v @ w / (np.linalg.norm(v) * np.linalg.norm(w)) if v.any() else math.nan)
        assert record["discrepancy"]["magnitude"] == pytest.approx(np.mean(magnitudes))
        if record["round"] == 1:
            assert record["discrepancy"]["direction"] is None  # a zero vector has no direction
        else:
            assert record["discrepancy"]["direction"] == pytest.approx(np.mean(directions))


def test_drift_is_of_the_logits_on_the_test_examples(run: Run) -> None:
    result, _, rounds = run
    test = torch.stack([item["x"] for item in toys.examples(99, 20)])
    federation = toys.federation(STEPS)

    def scores(tensors: Tensors) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            found: np.ndarray[Any, Any] = federation.assembly.objective.load(tensors).eval()(test).double().numpy()
        centred: np.ndarray[Any, Any] = found - found.mean(axis=0)
        return centred

    for record, clients in zip(result.records, rounds, strict=True):
        alike = []
        for before, after in clients:
            x, y = scores(before), scores(before | after)
            cross = np.linalg.norm(y.T @ x) ** 2
            alike.append(cross / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y))
        assert record["drift"]["mean"] == pytest.approx(np.mean(alike), abs=1e-6)
        assert record["drift"]["worst"] == pytest.approx(min(alike), abs=1e-6)


def test_errors_of_aggregation_are_those_of_the_rounds_weighted_means(run: Run) -> None:
    result, _, rounds = run
    for record, clients in zip(result.records, rounds, strict=True):
        ends, squares = [before | after for before, after in clients], np.zeros(3)
        for pair in pairs(ends[0]):
            b, a = (np.array([one.tensor(name).double().numpy() for one in ends]) for name in (pair.b, pair.a))
            mean, mean_b, mean_a = (np.average(ones, axis=0, weights=SIZES) for ones in (b @ a, b, a))
            beyond = np.linalg.svd(mean, compute_uv=False)[2:]
            squares += [np.sum(one**2) for one in (mean - mean_b @ mean_a, beyond, mean)]
        averaged, lost, whole = np.sqrt(squares)
        assert averaged > 1e-3 * whole
        assert record["aggregation_error"] == pytest.approx({"fedavg": averaged / whole, "fra": lost / whole}, rel=1e-3)


def test_with_frozen_a_nothing_is_lost() -> None:
    frozen = toys.federation(asked("variation", "aggregation_error", **{"method.name": "ffa_lora"})).run().records[-1]
    assert frozen["aggregation_error"] == pytest.approx({"fedavg": 0, "fra": 0}, abs=1e-6)
    assert set(frozen["variation"]) == {"magnitude", "direction", "magnitude_b", "direction_b"}


def test_nothing_is_watched_unasked_and_no_client_for_what_the_server_knows_anyway() -> None:
    unasked, states = toys.federation(STEPS), toys.federation(asked("variation", **{"evaluation.bandwidth": 1.0}))
    assert (unasked.assembly.watch is None, states.assembly.watch is None) == (True, False)
    assert not [one for built in (unasked, states) for one in built.assembly.clients if one._setup.watch is not None]
    result = unasked.run()
    assert result.summary["diagnostics"] is None
    assert not {*ALL, "transfer_seconds"} & set(result.records[-1])


def test_watching_changes_nothing_of_the_run() -> None:
    watched, plain = (
        toys.federation(settings, model=toys.model(dropout=0.3)).run() for settings in (asked(*ALL), STEPS)
    )
    assert toys.same(watched.state.tensors, plain.state.tensors)
    bare = [{name: value for name, value in record.items() if name not in ALL} for record in watched.records]
    assert toys.without_time(bare) == toys.without_time(plain.records)


def killed_in(federation: Federation, round_: int) -> None:
    """Arranges an interruption in round `round_`, after two of its clients have trained."""
    whole, done = federation.assembly.clients[2].handle, [0]

    def handle(request: Any) -> Any:
        done[0] += 1
        if done[0] == round_:
            raise KeyboardInterrupt
        return whole(request)

    federation.assembly.clients[2].handle = handle  # type: ignore[method-assign]


@pytest.mark.parametrize("same", chosen([False, True], [True]))
def test_an_interrupted_run_tells_the_same(tmp_path: Path, same: bool) -> None:
    """Also if the same object goes on: measurements of clients in the interrupted round are not counted twice."""
    more = {"method.name": "fra_lora", "evaluation.bandwidth": 0.5, "evaluation.target_accuracy": 0.4}
    settings = asked(*ALL, **more)
    whole, first = toys.federation(settings).run(), toys.federation(settings)
    killed_in(first, 2)
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path / "run")
    again = (first if same else toys.federation(settings)).run(tmp_path / "run", resume=True)
    assert toys.without_time(again.records) == toys.without_time(whole.records)
    assert toys.without_time(read_records(tmp_path / "run")) == toys.without_time(whole.records)
    assert again.summary["diagnostics"]["target"] == whole.summary["diagnostics"]["target"]


def test_a_client_that_diverged_is_left_out() -> None:
    federation = toys.federation(asked("discrepancy", "aggregation_error", "drift"))
    broken = [{**item, "x": item["x"] * math.nan} for item in toys.examples(1, 5)]
    federation.assembly.clients[0].examples = broken
    records = federation.run().records
    assert [record["rejected"] for record in records] == [["client-0"]] * 3
    assert all(math.isfinite(record["discrepancy"]["magnitude"]) for record in records)


SHRINKS = {"method.warmup_rounds": 0, "method.final_rounds": 1, "method.final_rank": 1}


@every(
    ("name", "more"),
    [("fedara", SHRINKS), ("svd_adaptation", {}), ("fedft", {"method.rank": 8})],
)
def test_methods_whose_tensors_are_no_pairs(name: str, more: dict[str, Any]) -> None:
    settings = asked("variation", "discrepancy", "drift", **{"method.name": name, **more})
    records = toys.federation(settings).run().records
    assert all(record["variation"]["magnitude"] > 0 for record in records)
    assert all(record["discrepancy"]["magnitude"] > 0 for record in records)
    if name == "fedft":
        with refused(ConfigError, "evaluation.diagnostics"):
            toys.federation(asked("aggregation_error", **{"method.name": name, **more}))


def test_of_tensors_that_are_no_factors_each_is_compared() -> None:
    weights = Weights(toys.OnePass(), Tensors())
    before, after = (
        Tensors({"w": torch.tensor(numbers), "still": torch.ones(2)}) for numbers in ([3.0, 4.0], [0.0, 1.0])
    )
    assert Variation(weights).between(State(before), State(after)) == pytest.approx(
        {"magnitude": 4.0, "direction": 0.2}
    )
    discrepancy = Discrepancy(weights)
    discrepancy.see(before, after.select(["w"]), 1.0)
    assert discrepancy.collected() == pytest.approx({"magnitude": math.sqrt(18), "direction": 0.8})


CLIENT = {"privacy.unit": "client", "privacy.epsilon": 8.0}
MASKED = {"secure_aggregation.enabled": True}


@every("name", ["discrepancy", "drift", "aggregation_error"])
@every("protected", [CLIENT, {**CLIENT, "privacy.unit": "example"}, MASKED])
def test_single_clients_are_not_looked_at_where_they_are_protected(name: str, protected: dict[str, Any]) -> None:
    with refused(ConfigError, "evaluation.diagnostics"):
        toys.config(asked(name, **protected))


@every("protected", [MASKED, {**CLIENT, **MASKED, "privacy.noise": "distributed", "privacy.hidden_cohort": True}])
def test_public_states_may_be_compared_under_protection(protected: dict[str, Any]) -> None:
    more = {"evaluation.bandwidth": 1.0, "evaluation.target_accuracy": 0.99, **protected}
    result = toys.federation(asked("variation", **more)).run()
    told = result.summary["diagnostics"]
    assert told["variation"]["magnitude"] > 0
    secret = "privacy.unit" in protected
    assert (told["bandwidth"]["compute_seconds"] is None) is (told["bandwidth"]["seconds"] is None) is secret
    jsonschema.validate(told, SCHEMA["properties"]["diagnostics"])


def test_a_private_run_that_was_interrupted_tells_the_variation_of_what_it_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = asked("variation", **CLIENT)
    federation = toys.federation(settings)
    kept = Kept(federation)
    federation.callbacks.append(kept)

    def stop(federation: Any, state: State) -> dict[str, Any]:
        if state.round == 2 and not (tmp_path / "stopped").exists():
            (tmp_path / "stopped").touch()
            raise KeyboardInterrupt
        return {"accuracy": 0.5}

    monkeypatch.setattr("secure_fed.runs.run.evaluated", stop)
    with pytest.raises(KeyboardInterrupt):
        federation.run(tmp_path / "run")
    records = federation.run(tmp_path / "run", resume=True).records
    watch = federation.assembly.watch
    assert watch is not None
    assert watch.variation is not None
    for before, after, record in zip(kept.states, kept.states[1:], records, strict=False):
        assert record["variation"] == watch.variation.between(before, after)


def test_names_that_are_none_or_are_taken() -> None:
    with refused(ConfigError, "evaluation.diagnostics"):
        RunConfig.from_dict({"evaluation": {"diagnostics": ["cka"]}})
    federation = toys.federation(asked("variation"), metrics=lambda model, batches: {"variation": 1.0})
    with refused(ConfigError, "metrics"):
        federation.run()


# Diagnostics from the records alone.


def rows(accuracies: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"round": i + 1, "cohort": 4, "bytes_up": 6_000_000, "bytes_down": 2_000_000, "seconds": 8.0, "accuracy": one}
        for i, one in enumerate(accuracies)
    ]


@every(
    ("accuracies", "rounds"),
    [([0.5, 0.8, 0.7], 2), ([0.5, None, 0.9], 3), ([0.5, 0.79, 0.1], None), ([0.9], 1), ([], None)],
)
def test_rounds_to_a_target(accuracies: list[float | None], rounds: int | None) -> None:
    told = diagnostics.summary(
        rows(accuracies), EvaluationConfig(target_accuracy=0.8), "classification", secret_cohort=False
    )["target"]
    sent = None if rounds is None else rounds * 6_000_000
    assert (told["metric"], told["accuracy"], told["rounds"], told["bytes_up"]) == ("accuracy", 0.8, rounds, sent)


@every("task", ["tokens", "question_answering"])
def test_a_target_of_entities_or_answers_is_an_f1(task: str) -> None:
    records = [row | {"f1": f1} for row, f1 in zip(rows([0.95, 0.96, 0.97]), (0.0, 0.4, 0.85), strict=True)]
    for target, reached in ((0.8, 3), (0.9, None)):
        settings = EvaluationConfig(target_accuracy=target)
        told = diagnostics.summary(records, settings, task, secret_cohort=False)["target"]
        assert (told["metric"], told["accuracy"], told["rounds"]) == ("f1", target, reached)


def test_time_over_a_line_of_one_megabyte_a_second() -> None:
    records = rows([0.1, 0.2])
    for row in records:
        row["transfer_seconds"] = diagnostics.transfer_seconds(row, 1.0)
        assert row["transfer_seconds"] == pytest.approx(2.0)  # (6 + 2) MB over 4 clients' separate lines
    told = diagnostics.summary(records, EvaluationConfig(bandwidth=1.0), "classification", secret_cohort=False)[
        "bandwidth"
    ]
    assert told == pytest.approx(
        {"megabytes_per_second": 1.0, "transfer_seconds": 4.0, "compute_seconds": 4.0, "seconds": 8.0}
    )
    assert diagnostics.transfer_seconds({**records[0], "cohort": 0}, 1.0) == 0.0
