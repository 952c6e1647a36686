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
from secure_fed.learning.models.adapters.lora import Pair, pairs
from secure_fed.methods.method import State
from secure_fed.rounds import diagnostics
from secure_fed.rounds.client import Client
from secure_fed.rounds.diagnostics import (
    AggregationError,
    Discrepancy,
    Drift,
    Variation,
    Watch,
    Weights,
    features,
    linear_cka,
    of_columns,
    of_wholes,
    watch,
)
from secure_fed.runs.run import Result
from secure_fed.runs.store import read_records
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import toys


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_columns_by_a_loop() -> None:
    v, w = random(5, 7), random(5, 7, seed=1)
    magnitudes, directions = [], []
    for j in range(7):
        a, b = [float(x) for x in v[:, j]], [float(x) for x in w[:, j]]
        length_a, length_b = math.sqrt(sum(x * x for x in a)), math.sqrt(sum(x * x for x in b))
        magnitudes.append(abs(length_a - length_b))
        directions.append(1 - sum(x * y for x, y in zip(a, b, strict=True)) / (length_a * length_b))
    assert of_columns(v, w) == pytest.approx((sum(magnitudes) / 7, sum(directions) / 7))


def test_columns_of_known_angles() -> None:
    before = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    after = torch.tensor([[3.0, 0.0, -1.0], [0.0, 1.0, 0.0]])  # longer, turned by 90 degrees, reversed
    assert of_columns(before, after) == pytest.approx((2 / 3, (0 + 1 + 2) / 3))
    assert of_columns(before, before * 5) == pytest.approx((4.0, 0.0))


def test_columns_of_zeros() -> None:
    zeros = torch.zeros(2, 2)
    assert of_columns(zeros, zeros) == (0.0, 0.0)
    assert of_columns(zeros, torch.eye(2)) == (1.0, 1.0)
    assert of_columns(torch.eye(2), zeros) == (1.0, 1.0)


def test_a_vector_is_one_column_and_more_axes_are_flattened() -> None:
    v, w = random(6), random(6, seed=1)
    assert of_columns(v, w) == pytest.approx(of_columns(v[:, None], w[:, None]))
    v, w = random(3, 2, 4), random(3, 2, 4, seed=1)
    assert of_columns(v, w) == pytest.approx(of_columns(v.reshape(3, 8), w.reshape(3, 8)))


def test_wholes_are_one_long_vector() -> None:
    v, w = [random(2, 3), random(4, seed=2)], [random(2, 3, seed=3), random(4, seed=4)]
    one = np.concatenate([part.numpy().ravel() for part in v])
    other = np.concatenate([part.numpy().ravel() for part in w])
    expected = (np.linalg.norm(one - other), one @ other / np.linalg.norm(one) / np.linalg.norm(other))
    assert of_wholes(zip(v, w, strict=True)) == pytest.approx(expected)


def test_the_angle_to_nothing_is_no_number() -> None:
    magnitude, direction = of_wholes([(torch.zeros(3), torch.ones(3))])
    assert magnitude == pytest.approx(math.sqrt(3))
    assert math.isnan(direction)


def naive_cka(x: Tensor, y: Tensor) -> float:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with centred linear kernels, entry by entry."""

    def centred(features: Tensor) -> list[list[float]]:
        n = len(features)
        kernel = [[float((features[i] * features[j]).sum()) for j in range(n)] for i in range(n)]
        rows = [sum(row) / n for row in kernel]
        whole = sum(rows) / n
        return [[kernel[i][j] - rows[i] - rows[j] + whole for j in range(n)] for i in range(n)]

    def inner(k: list[list[float]], m: list[list[float]]) -> float:
        return sum(a * b for row, other in zip(k, m, strict=True) for a, b in zip(row, other, strict=True))

    k, m = centred(x), centred(y)
    return inner(k, m) / math.sqrt(inner(k, k) * inner(m, m))


@pytest.mark.parametrize("shape", [(12, 3), (5, 9)])
def test_cka_by_kernels(shape: tuple[int, int]) -> None:
    x, y = random(*shape), random(shape[0], shape[1] + 1, seed=1)
    assert linear_cka(x, y) == pytest.approx(naive_cka(x, y))


def test_cka_knows_no_rotation_scale_or_shift() -> None:
    x = random(40, 4)
    rotation = torch.linalg.qr(random(4, 4, seed=1)).Q
    assert linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1)
    assert linear_cka(x, x @ random(4, 4, seed=2)) < 0.999
    assert linear_cka(x, random(40, 4, seed=3)) < 0.5
    assert math.isnan(linear_cka(x, torch.ones(40, 4)))


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


def test_features_are_what_leaves_the_model() -> None:
    scores = random(6, 3).float()
    assert torch.equal(seen(scores), scores)
    assert torch.equal(seen(Output(logits=scores)), scores)
    assert torch.equal(seen(scores[:, 0]), scores[:, :1])


def test_features_of_tokens_leave_padding_out() -> None:
    scores, mask = random(2, 3, 4).float(), torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert torch.equal(seen(scores, {"attention_mask": mask}), torch.stack([scores[0, 0], scores[0, 1], scores[1, 0]]))
    assert torch.equal(seen(scores), scores.reshape(6, 4))
    ends = Output(start_logits=scores[..., 0], end_logits=scores[..., 1])
    assert torch.equal(seen(ends, {"attention_mask": mask}), seen(scores[..., :2], {"attention_mask": mask}))


def test_features_are_four_an_example_at_most() -> None:
    tokens = torch.arange(300.0).reshape(3, 100, 1)
    found = seen(tokens)
    assert (found.shape, found[0].item(), found[-1].item()) == ((12, 1), 0.0, 299.0)
    assert found[:, 0].diff().min() >= 27


def test_a_model_without_logits() -> None:
    with pytest.raises(ConfigError, match=r"'drift' compares logits, and the model gives a Output"):
        seen(Output(hidden=[1]))


PAIR = Pair("layer", "a", "b")


def round_of(clients: int, weights: list[float], rank: int = 2) -> tuple[dict[str, float], list[tuple[Tensor, Tensor]]]:
    """The aggregation errors of a round whose clients have random factors, and these factors."""
    factors = [(random(6, rank, seed=i), random(rank, 5, seed=100 + i)) for i in range(clients)]
    error = AggregationError([PAIR])
    for (b, a), weight in zip(factors, weights, strict=True):
        error.see(Tensors({"a": torch.zeros(rank, 5), "b": torch.zeros(6, rank)}), Tensors({"a": a, "b": b}), weight)
    return error.collected(), factors


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.0, 5.0, 2.0]])
def test_errors_of_aggregation_by_hand(weights: list[float]) -> None:
    told, factors = round_of(3, weights)
    total = sum(weights)
    bs = torch.stack([weight / total * b for weight, (b, _) in zip(weights, factors, strict=True)])
    products = torch.stack([weight / total * (b @ a) for weight, (b, a) in zip(weights, factors, strict=True)])
    mean, mean_b = products.sum(dim=0), bs.sum(dim=0)
    mean_a = torch.stack([weight / total * a for weight, (_, a) in zip(weights, factors, strict=True)]).sum(dim=0)
    u, s, vt = np.linalg.svd(np.asarray(mean))
    rest = np.asarray(mean) - (u[:, :2] * s[:2]) @ vt[:2]
    norm = np.linalg.norm(np.asarray(mean))
    assert told["fedavg"] == pytest.approx(np.linalg.norm(np.asarray(mean - mean_b @ mean_a)) / norm)
    assert told["fra"] == pytest.approx(np.linalg.norm(rest) / norm)


def test_of_two_clients_it_is_the_papers_formula() -> None:
    told, ((b1, a1), (b2, a2)) = round_of(2, [1.0, 1.0])
    mean = (b1 @ a1 + b2 @ a2) / 2
    assert told["fedavg"] == pytest.approx(float((0.25 * (b1 - b2) @ (a1 - a2)).norm() / mean.norm()))


def test_one_client_loses_nothing() -> None:
    told, _ = round_of(1, [1.0])
    assert told == pytest.approx({"fedavg": 0, "fra": 0}, abs=1e-7)


def test_a_round_is_told_once() -> None:
    error = AggregationError([PAIR])
    assert error.collected() == {}
    error.see(Tensors({"a": random(2, 5), "b": random(6, 2)}), Tensors(), 1.0)
    assert error.collected()
    assert error.collected() == {}


ALL = ["variation", "discrepancy", "drift", "aggregation_error"]
SCHEMA = json.loads((Path(__file__).resolve().parents[2] / "docs" / "result.schema.json").read_text(encoding="utf-8"))
STEPS = {"training.steps": 4, "training.lr": 0.1}


def asked(*names: str, **more: Any) -> dict[str, Any]:
    return {**STEPS, "evaluation.diagnostics": list(names), **more}


class Kept:
    """A callback that keeps every global state of a run."""

    def __init__(self, federation: Federation) -> None:
        self.states = [federation.assembly.initial]

    def on_round_end(self, record: Mapping[str, Any], state: State) -> None:
        self.states.append(state)


def run(settings: Mapping[str, Any]) -> tuple[Result, list[State], list[list[tuple[Tensors, Tensors]]]]:
    """The result, the global states, and for each round every client's tensors before and after training."""
    federation = toys.federation(settings)
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


def test_variation_is_between_the_states_of_two_rounds() -> None:
    result, states, _ = run(asked("variation"))
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


def test_of_a_frozen_factor_there_is_no_variation() -> None:
    record = toys.federation(asked("variation", **{"method.name": "ffa_lora"})).run().records[-1]
    assert set(record["variation"]) == {"magnitude", "direction", "magnitude_b", "direction_b"}


def test_discrepancy_is_the_mean_over_the_clients_of_a_round() -> None:
    result, _, rounds = run(asked("discrepancy"))
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


def test_drift_is_of_the_logits_on_the_test_examples() -> None:
    result, _, rounds = run(asked("drift"))
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


def test_aggregation_errors_of_a_round() -> None:
    """FRA's own state after a round is the truncated mean. The diagnostic reports what the truncation lost."""
    result, states, rounds = run(asked("aggregation_error", **{"method.name": "fra_lora"}))
    for record, after, clients in zip(result.records, states[1:], rounds, strict=True):
        means = [np.mean(matrices, axis=0) for matrices in zip(*(products(b | a) for b, a in clients), strict=True)]
        lost = [np.linalg.norm(mean - kept) for mean, kept in zip(means, products(after.tensors), strict=True)]
        whole = np.linalg.norm([np.linalg.norm(mean) for mean in means])
        assert record["aggregation_error"]["fra"] == pytest.approx(np.linalg.norm(lost) / whole, rel=1e-3, abs=1e-6)


def test_with_frozen_a_nothing_is_lost_and_with_both_trained_something_is() -> None:
    lost = {
        name: toys.federation(asked("aggregation_error", **{"method.name": name}))
        .run()
        .records[-1]["aggregation_error"]
        for name in ("ffa_lora", "fedlora")
    }
    assert lost["ffa_lora"] == pytest.approx({"fedavg": 0, "fra": 0}, abs=1e-6)
    assert lost["fedlora"]["fedavg"] > 1e-3


def test_weights_of_clients_are_those_of_the_mean() -> None:
    """If one client has almost all of the weight, the mean of products is almost its product, and almost nothing is lost."""
    more = {"federation.weighting": "examples", "evaluation.diagnostics": ["aggregation_error"]}
    uneven = toys.federation({**STEPS, **more}, sizes=(4000, 1, 1)).run().records[-1]["aggregation_error"]
    even = toys.federation({**STEPS, **more}, sizes=(4, 4, 4)).run().records[-1]["aggregation_error"]
    assert uneven["fedavg"] < even["fedavg"] / 10


def test_without_diagnostics_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watch, "__init__", None)
    federation = toys.federation(STEPS)
    assert federation.assembly.watch is None
    assert all(client._setup.watch is None for client in federation.assembly.clients)
    result = federation.run()
    assert result.summary["diagnostics"] is None
    assert not {*ALL, "transfer_seconds"} & set(result.records[-1])


def test_what_the_server_knows_anyway_taps_no_client() -> None:
    federation = toys.federation(asked("variation", **{"evaluation.bandwidth": 1.0}))
    assert federation.assembly.watch is not None
    assert all(client._setup.watch is None for client in federation.assembly.clients)


def test_watching_changes_nothing_of_the_run() -> None:
    watched, plain = toys.federation(asked(*ALL)).run(), toys.federation(STEPS).run()
    assert toys.same(watched.state.tensors, plain.state.tensors)
    bare = [{name: value for name, value in record.items() if name not in ALL} for record in watched.records]
    assert toys.without_time(bare) == toys.without_time(plain.records)


def test_dropout_is_left_as_it_is() -> None:
    watched = toys.federation(asked(*ALL), model=toys.model(dropout=0.3)).run()
    plain = toys.federation(STEPS, model=toys.model(dropout=0.3)).run()
    assert toys.same(watched.state.tensors, plain.state.tensors)


def killed_in(federation: Federation, round_: int) -> None:
    """Arranges an interruption in round `round_`, after two of its clients have trained."""
    whole, done = federation.assembly.clients[2].handle, [0]

    def handle(request: Any) -> Any:
        done[0] += 1
        if done[0] == round_:
            raise KeyboardInterrupt
        return whole(request)

    federation.assembly.clients[2].handle = handle  # type: ignore[method-assign]


@pytest.mark.parametrize("name", chosen(["fedlora", "fra_lora", "ffa_lora"], ["fra_lora"]))
def test_an_interrupted_run_tells_the_same(tmp_path: Path, name: str) -> None:
    settings = asked(*ALL, **{"method.name": name, "evaluation.bandwidth": 0.5, "evaluation.target_accuracy": 0.4})
    whole = toys.federation(settings).run()
    first = toys.federation(settings)
    killed_in(first, 2)
    with pytest.raises(KeyboardInterrupt):
        first.run(tmp_path / "run")
    again = toys.federation(settings).run(tmp_path / "run", resume=True)
    assert toys.without_time(again.records) == toys.without_time(whole.records)
    assert toys.without_time(read_records(tmp_path / "run")) == toys.without_time(whole.records)
    assert again.summary["diagnostics"]["target"] == whole.summary["diagnostics"]["target"]


def test_the_same_federation_after_an_interruption(tmp_path: Path) -> None:
    """Measurements of clients in an interrupted round are not counted when the round is run again."""
    federation = toys.federation(asked(*ALL))
    expected = toys.without_time(toys.federation(asked(*ALL)).run().records)
    killed_in(federation, 2)
    with pytest.raises(KeyboardInterrupt):
        federation.run(tmp_path / "run")
    assert toys.without_time(federation.run(tmp_path / "run", resume=True).records) == expected


def test_a_client_that_diverged_is_left_out() -> None:
    federation = toys.federation(asked("discrepancy", "aggregation_error", "drift"))
    broken = [{**item, "x": item["x"] * math.nan} for item in toys.examples(1, 5)]
    federation.assembly.clients[0].examples = broken
    records = federation.run().records
    assert [record["rejected"] for record in records] == [["client-0"]] * 3
    assert all(math.isfinite(record["discrepancy"]["magnitude"]) for record in records)


def test_what_clients_are_given_is_looked_at_once_where_it_is_the_same() -> None:
    looked: list[Tensors] = []

    def features(tensors: Tensors) -> torch.Tensor:
        looked.append(tensors)
        return torch.arange(4.0)[:, None] + tensors.tensor("w")

    drift = Drift(features)
    given = Tensors({"w": torch.zeros(1)})
    after = Tensors({"w": torch.ones(1)})
    for before in (given, given | {}, given):
        drift.see(before, after, 1.0)
    assert len(looked) == 1 + 3
    drift.see(Tensors({"w": torch.zeros(1)}), after, 1.0)  # a client whose model starts with a tensor of its own
    assert len(looked) == 2 + 4
    assert drift.collected() == pytest.approx({"mean": 1.0, "worst": 1.0})
    assert drift.collected() == {}


SHRINKS = {"method.warmup_rounds": 0, "method.final_rounds": 1, "method.final_rank": 1}


@pytest.mark.parametrize(
    ("name", "more"),
    [("fedara", SHRINKS), ("svd_adaptation", {}), ("federa", {}), ("fedft", {"method.rank": 8})],
)
def test_methods_whose_tensors_are_no_pairs(name: str, more: dict[str, Any]) -> None:
    settings = asked("variation", "discrepancy", "drift", **{"method.name": name, **more})
    records = toys.federation(settings).run().records
    assert all(record["variation"]["magnitude"] > 0 for record in records)
    assert all(record["discrepancy"]["magnitude"] > 0 for record in records)


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


def test_errors_of_products_need_products() -> None:
    federation = toys.federation(STEPS)
    config, parts = toys.config(asked("aggregation_error")), federation.assembly.problem
    initial = Tensors({"w": torch.ones(1)})
    with pytest.raises(ConfigError, match=r"'aggregation_error' compares products of LoRA's factors"):
        watch(
            config,
            federation.assembly.method,
            initial,
            federation.assembly.objective,
            parts.collate,
            parts.loss,
            parts.test,
        )


def test_the_result_says_the_last_round_and_the_schema_knows_it() -> None:
    more = {"evaluation.bandwidth": 1.0, "evaluation.target_accuracy": 0.01}
    result = toys.federation(asked(*ALL, **more)).run()
    told = result.summary["diagnostics"]
    assert {name: told[name] for name in ALL} == {name: result.records[-1][name] for name in ALL}
    assert result.summary["metrics"] == {}
    schema = {**SCHEMA["properties"]["diagnostics"]}
    jsonschema.validate(told, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**told, "surprise": 1}, schema)


@pytest.mark.parametrize("name", ["discrepancy", "drift", "aggregation_error"])
@pytest.mark.parametrize(
    ("protected", "reason"),
    [
        ({"privacy.unit": "client", "privacy.epsilon": 8.0}, r"privacy\.unit = 'client': .*without noise"),
        ({"privacy.unit": "example", "privacy.epsilon": 8.0}, r"privacy\.unit = 'example': .*without noise"),
        ({"secure_aggregation.enabled": True}, r"secure_aggregation\.enabled = true: .*only their sum"),
    ],
)
def test_single_clients_are_not_looked_at_where_they_are_protected(
    name: str, protected: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=rf"evaluation\.diagnostics = '{name}' is refused with {reason}"):
        toys.config(asked(name, **protected))


@pytest.mark.parametrize(
    "protected",
    [
        {"privacy.unit": "client", "privacy.epsilon": 8.0},
        {"secure_aggregation.enabled": True},
        {
            "privacy.unit": "client",
            "privacy.epsilon": 8.0,
            "privacy.noise": "distributed",
            "privacy.hidden_cohort": True,
            "secure_aggregation.enabled": True,
        },
    ],
)
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
    settings = asked("variation", **{"privacy.unit": "client", "privacy.epsilon": 8.0})
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


def test_an_unknown_diagnostic() -> None:
    with pytest.raises(
        ConfigError, match=r"evaluation\.diagnostics names 'cka'; it must be one of variation, discrepancy"
    ):
        RunConfig.from_dict({"evaluation": {"diagnostics": ["cka"]}})


def test_a_metric_may_not_be_called_like_a_diagnostic() -> None:
    federation = toys.federation(asked("variation"), metrics=lambda model, batches: {"variation": 1.0})
    with pytest.raises(ConfigError, match="'variation', which is a diagnostic's name too"):
        federation.run()


# Diagnostics from the records alone.


def rows(accuracies: list[float | None]) -> list[dict[str, Any]]:
    return [
        {"round": i + 1, "cohort": 4, "bytes_up": 6_000_000, "bytes_down": 2_000_000, "seconds": 8.0, "accuracy": one}
        for i, one in enumerate(accuracies)
    ]


@pytest.mark.parametrize(
    ("accuracies", "rounds"),
    [([0.5, 0.8, 0.7], 2), ([0.5, None, 0.9], 3), ([0.5, 0.79, 0.1], None), ([0.9], 1), ([], None)],
)
def test_rounds_to_a_target(accuracies: list[float | None], rounds: int | None) -> None:
    told = diagnostics.summary(
        rows(accuracies), EvaluationConfig(target_accuracy=0.8), "classification", secret_cohort=False
    )["target"]
    sent = None if rounds is None else rounds * 6_000_000
    assert (told["metric"], told["accuracy"], told["rounds"], told["bytes_up"]) == ("accuracy", 0.8, rounds, sent)


@pytest.mark.parametrize("task", ["tokens", "question_answering"])
def test_a_target_of_entities_or_answers_is_an_f1(task: str) -> None:
    records = [row | {"f1": f1} for row, f1 in zip(rows([0.95, 0.96, 0.97]), (0.0, 0.4, 0.85), strict=True)]
    for target, reached in ((0.8, 3), (0.9, None)):
        settings = EvaluationConfig(target_accuracy=target)
        told = diagnostics.summary(records, settings, task, secret_cohort=False)["target"]
        assert (told["metric"], told["accuracy"], told["rounds"]) == ("f1", target, reached)


def test_a_target_that_is_never_measured() -> None:
    federation = toys.federation({"evaluation.target_accuracy": 0.5}, metrics=lambda model, batches: {"f1": 1.0})
    with pytest.raises(ConfigError, match=r"evaluation\.target_accuracy = 0\.5 needs 'accuracy'"):
        federation.run()


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


def test_the_bytes_of_a_run_are_those_of_its_lines() -> None:
    result = toys.federation({**STEPS, "evaluation.bandwidth": 2.0}).run()
    for record in result.records:
        moved = record["bytes_up"] + record["bytes_down"]
        assert record["transfer_seconds"] == pytest.approx(moved / 3 / 2e6)
