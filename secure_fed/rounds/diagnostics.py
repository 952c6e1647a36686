"""Diagnostics that the papers plot beside accuracy (`evaluation.diagnostics`). They cost nothing unless requested.

`Watch` computes them: from every client's training (`Discrepancy`, `Drift`, `AggregationError`, which no noise covers), and
from consecutive global states (`Variation`). Papers leave open whether a client's tensors are compared with the global model
before the round or after it. Here it is the model before the round, so nothing of a client must be kept.

`summary` has rounds and bytes to a target of the task's headline metric, and time under a bandwidth. Both are computed from
records alone, so they do not change if a run is interrupted and resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from secure_fed.config import EvaluationConfig, RunConfig
from secure_fed.errors import ConfigError
from secure_fed.learning.data.encode import batches
from secure_fed.learning.models.adapters.lora import LoraForm, Pair, pairs
from secure_fed.learning.problem import Problem
from secure_fed.learning.tasks.headline import headline
from secure_fed.learning.tasks.task import Batch, Loss
from secure_fed.learning.training.objective import Objective, to_device
from secure_fed.methods.method import LoraShaped, Method, State
from secure_fed.tensors.low_rank import truncated
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, LowRank, Tensors, dense


@dataclass(frozen=True)
class Watch:
    """Collects the diagnostics of a run over a round.

    It carries nothing from one round to the next, so an interrupted run resumes with the same numbers.
    """

    settings: EvaluationConfig
    local: Mapping[str, Local]
    variation: Variation | None = None

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        """Take a client's tensors before and after training. Tensors that are not finite are left out, as in the round."""
        if after.is_finite():
            for one in self.local.values():
                one.see(before, after, weight)

    def begin(self) -> None:
        """Forget an interrupted round."""
        for one in self.local.values():
            one.collected()

    def entries(self, before: State, after: State, record: Mapping[str, Any]) -> dict[str, Any]:
        """Entries for the round's record. Undefined numbers are None."""
        found = {name: numbers for name, one in self.local.items() if (numbers := one.collected())}
        if self.variation is not None:
            found["variation"] = self.variation.between(before, after)
        entries: dict[str, Any] = {
            name: {key: value if math.isfinite(value) else None for key, value in own.items()}
            for name, own in found.items()
        }
        if self.settings.bandwidth is not None:
            entries["transfer_seconds"] = transfer_seconds(record, self.settings.bandwidth)
        if clash := sorted(set(entries) & set(record)):
            message = f"metrics gives {clash[0]!r}, which is a diagnostic's name too; call it something else"
            raise ConfigError(message).about("metrics", clash[0], "a name of its own")
        return entries


def watch(config: RunConfig, method: Method, initial: Tensors, objective: Objective, problem: Problem) -> Watch | None:
    """The diagnostics that `config` requests; None if it requests none."""
    settings = config.evaluation
    if not settings.diagnostics and settings.bandwidth is None:
        return None
    weights, chosen = Weights(method, initial), settings.diagnostics
    local: dict[str, Local] = {}
    if "discrepancy" in chosen:
        local["discrepancy"] = Discrepancy(weights)
    if "drift" in chosen:
        local["drift"] = Drift(partial(_of_tests, objective, problem, settings.batch_size))
    if "aggregation_error" in chosen:
        if not pairs(initial):
            raise ConfigError(
                "evaluation.diagnostics = 'aggregation_error' compares products of LoRA's factors A and B, and "
                f"method.name = {config.method.name!r} trains none; leave it out"
            ).about("evaluation.diagnostics", "aggregation_error", "a method of LoRA's factors")
        local["aggregation_error"] = AggregationError(pairs(initial))
    return Watch(settings, local, Variation(weights) if "variation" in chosen else None)


def _of_tests(objective: Objective, problem: Problem, batch_size: int, tensors: Tensors) -> Tensor:
    """The features of 256 test examples, spread evenly over the test set, or of all of a smaller one."""
    test = problem.test
    chosen = [test[i] for i in torch.linspace(0, len(test) - 1, min(256, len(test))).long().tolist()]
    made = batches(chosen, batch_size, problem.collate, None)
    inputs = (to_device(batch.inputs, objective.device) for batch in made)
    return features(objective.load(tensors), problem.loss, inputs)


@dataclass(frozen=True)
class Weights:
    """The compared part of a state of `method` in a run that began with `initial`.

    Both papers compare the learned part beside the frozen model, FedARA the product of the factors. So where the adapters are
    LoRA's, or can be written so, it is s B A of every adapted matrix; elsewhere every tensor that trains.
    """

    method: Method
    initial: Tensors

    def pairs(self, before: Tensors, after: Tensors, trained: tuple[str, ...]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each compared matrix in both states, formed one after the other; matrices whose shape changes are left out."""
        if not isinstance(self.method, LoraShaped):
            for name in trained:
                if before.tensor(name).shape == after.tensor(name).shape:
                    yield before.tensor(name), after.tensor(name)
            return
        one, other = (_formed(self.method.as_lora(self.initial, tensors)) for tensors in (before, after))
        for module in sorted(one.keys() | other.keys()):
            found = (one.get(module), other.get(module))
            v, w = (dense(product) if product is not None else None for product in found)
            if v is not None:
                yield v, torch.zeros_like(v) if w is None else w
            elif w is not None:
                yield torch.zeros_like(w), w


def _formed(form: LoraForm) -> dict[str, LowRank]:
    """s B A by module, float64; a module whose factors have all been given up is not in it."""
    scale = form.adapter.scaling
    return {module: LowRank(scale * b.double(), a.double()) for module, (a, b) in form.factors.items()}


class Local(Protocol):
    """A diagnostic over the clients of a round, taken one by one."""

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        """Take one client. before: all its tensors before training. after: the tensors that it trained. weight: in the mean."""

    def collected(self) -> dict[str, float]:
        """Numbers by name, over the clients since the last call; empty if there were none."""


@dataclass
class Discrepancy:
    """FedARA's magnitude and direction discrepancy (equations 5 and 6), each the mean over the clients of a round.

    Deviation: equation 5 prints the sum over clients, which would grow with the cohort.
    """

    weights: Weights
    _seen: list[tuple[float, float]] = field(default_factory=list)

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        self._seen.append(of_wholes(self.weights.pairs(before, before | after, tuple(after))))

    def collected(self) -> dict[str, float]:
        seen, self._seen = self._seen, []
        return _means(seen)


@dataclass
class Drift:
    """C2A's drift: CKA between the model that a client received and the model that it trained, on the same held-out examples.

    features(tensors) -> (rows, p) of the model with these tensors. The received model is evaluated once where it is the same
    for all clients.
    """

    features: Callable[[Tensors], Tensor]
    _given: tuple[Tensors, Tensor] | None = None
    _seen: list[float] = field(default_factory=list)

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        if self._given is None or not _same_objects(self._given[0], before):
            self._given = (before, self.features(before))
        self._seen.append(linear_cka(self._given[1], self.features(before | after)))

    def collected(self) -> dict[str, float]:
        seen, self._seen, self._given = self._seen, [], None
        return {"mean": _mean(seen), "worst": min(seen, default=math.nan)} if seen else {}


def _same_objects(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


@dataclass
class AggregationError:
    """The error of averaging factors instead of products (Trautmann et al., 2025, error analysis in section V).

    Over the clients i of a round, with their weights in the mean, and per adapted matrix

        M = mean(B_i A_i),   err_FedAvg = M - mean(B_i) mean(A_i),   err_FRA = M - M_r,

    M_r being the best approximation of M by the rank r of its factors. Both are relative to M: the Frobenius norm of the error
    over all matrices, divided by the Frobenius norm of M. They show the error of either rule for these clients, whichever rule
    the run uses; the paper's own err_FedAvg, for two clients of one half each, is 0.25 (B_1 - B_2)(A_1 - A_2).

    It holds one round's means of factors and of products, over the clients seen so far.
    """

    pairs: Sequence[Pair]
    _sum: PlainSum | None = None

    def see(self, before: Tensors, after: Tensors, weight: float) -> None:
        whole = before | after
        factors = whole.select(name for pair in self.pairs for name in (pair.a, pair.b)).dense()
        products = {pair.module: LowRank(factors.tensor(pair.b), factors.tensor(pair.a)) for pair in self.pairs}
        seen = factors | products
        if self._sum is None:
            self._sum = PlainSum(Layout.of(seen))
        self._sum.add(seen, weight)

    def collected(self) -> dict[str, float]:
        total, self._sum = self._sum, None
        if total is None or not total.weight:
            return {}
        mean = total.total() * (1 / total.weight)
        lost = averaged = whole = 0.0
        for pair in self.pairs:
            a, b, product = mean.tensor(pair.a).double(), mean.tensor(pair.b).double(), mean[pair.module]
            if isinstance(product, LowRank):
                product = LowRank(product.left.double(), product.right.double())
            else:
                product = product.double()
            singular = truncated(product, min(product.shape)).s
            whole += float(singular.square().sum())
            lost += float(singular[a.shape[0] :].square().sum())
            averaged += float((dense(product) - b @ a).square().sum())
        if not whole:
            return {}
        return {"fedavg": math.sqrt(averaged / whole), "fra": math.sqrt(lost / whole)}


@dataclass(frozen=True)
class Variation:
    """FeDeRA's magnitude and direction variation between consecutive global states (equations 19 to 22, figures 3 and 4).

    The paper plots them of the factors A and B; here they are computed where a method has such factors and trains them, and
    also for the product of the factors, which does not depend on how it is split. Each is the mean over all matrices. Only
    tensors that the server sends out are used, so this reveals nothing new.
    """

    weights: Weights

    def between(self, before: State, after: State) -> dict[str, float]:
        """Numbers by name."""
        trained = self.weights.method.plan(before).trainable
        found = _means([of_columns(*pair) for pair in self.weights.pairs(before.tensors, after.tensors, trained)])
        factors = pairs(before.tensors)
        for factor, names in (("_a", [pair.a for pair in factors]), ("_b", [pair.b for pair in factors])):
            both = [(before.tensors.tensor(name), after.tensors.tensor(name)) for name in names if name in trained]
            found |= _means([of_columns(*pair) for pair in both if pair[0].shape == pair[1].shape], factor)
        return found


def _means(found: Sequence[tuple[float, float]], ending: str = "") -> dict[str, float]:
    """The mean magnitude and direction, each with this ending to its name; empty without any."""
    if not found:
        return {}
    magnitudes, directions = zip(*found, strict=True)
    return {f"magnitude{ending}": _mean(magnitudes), f"direction{ending}": _mean(directions)}


def _mean(values: Sequence[float]) -> float:
    """The mean; NaN if a value is NaN."""
    return math.fsum(values) / len(values)


def of_columns(before: Tensor, after: Tensor) -> tuple[float, float]:
    """FeDeRA's variation (Yan et al., arXiv 2404.18848, equations 19 to 22): for W (d, k) with columns w^1 ... w^k,

        magnitude(V, W) = mean_j | |v^j| - |w^j| |,    direction(V, W) = mean_j (1 - cos(v^j, w^j)).

    (magnitude, direction) of two matrices (d, k), in float64; a vector is one column; with more axes the first is d.

    A column of zeros has no direction: its variation is 1 against any other column, and 0 against zeros.
    """
    v, w = _columns(before), _columns(after)
    lengths_v, lengths_w = v.norm(dim=0), w.norm(dim=0)
    longest = lengths_v * lengths_w
    cosine = (v * w).sum(dim=0) / torch.where(longest > 0, longest, 1.0)
    direction = torch.where((lengths_v == 0) & (lengths_w == 0), 0.0, 1 - cosine.clamp(-1, 1))
    return float((lengths_v - lengths_w).abs().mean()), float(direction.mean())


def of_wholes(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """FedARA's discrepancy (equations 5 and 6) for one client, all matrices being one long vector, in float64.

    (|V - W|, cos(V, W)) over all matrices of (V, W); the cosine is NaN where one of the two is zero.
    """
    apart = both = square_v = square_w = 0.0
    for before, after in pairs:
        v, w = before.double().reshape(-1), after.double().reshape(-1)
        apart += float((v - w).square().sum())
        both, square_v, square_w = both + float(v @ w), square_v + float(v @ v), square_w + float(w @ w)
    longest = math.sqrt(square_v * square_w)
    return math.sqrt(apart), max(-1.0, min(1.0, both / longest)) if longest else math.nan


def _columns(weights: Tensor) -> Tensor:
    """(d, k), float64."""
    return weights.double().reshape(weights.shape[0] if weights.ndim > 1 else -1, -1 if weights.ndim > 1 else 1)


def linear_cka(x: Tensor, y: Tensor) -> float:
    """The similarity of two models on the same examples: linear centred kernel alignment (Kornblith et al., ICML 2019).

    For features X (n, p) and Y (n, q) of the same n examples, with every column's mean subtracted,

        CKA(X, Y) = |Y^T X|_F^2 / (|X^T X|_F |Y^T Y|_F),

    which is 1 for features equal up to rotation and scale, and near 0 for unrelated ones; NaN where features are the same for
    all examples. C2A (section 2) computes it from the logits of the global model and of a model in training.
    """
    x, y = (features.double() - features.double().mean(dim=0) for features in (x, y))
    if x.shape[0] < max(x.shape[1], y.shape[1]):  # n x n Gram matrices are the smaller
        k, m = x @ x.T, y @ y.T
        cross, own_x, own_y = float((k * m).sum()), float(k.norm()), float(m.norm())
    else:
        cross, own_x, own_y = float((y.T @ x).square().sum()), float((x.T @ x).norm()), float((y.T @ y).norm())
    longest = own_x * own_y
    return min(1.0, cross / longest) if longest > 0 else math.nan


@torch.no_grad()
def features(model: nn.Module, loss: Loss, batches: Iterable[Batch]) -> Tensor:
    """(rows, p): the model's output for each example, or for its tokens that are not padding.

    A batch gives at most four rows an example, spread evenly, since a language model's output is large. It is captured where
    the model's output enters the task's loss, so that this works for any task and any batch.
    """
    seen: list[Tensor] = []
    rows: list[Tensor] = []
    model.eval()
    hook = model.register_forward_hook(lambda module, inputs, output: seen.append(_scores(output)))
    try:
        for batch in batches:
            seen.clear()
            examples = len(loss(model, batch))
            found = _flat(seen[-1], batch)
            chosen = torch.linspace(0, len(found) - 1, min(4 * examples, len(found))).long()
            rows.append(found[chosen.to(found.device)].cpu())
    finally:
        hook.remove()
    return torch.cat(rows)


def _scores(output: Any) -> Tensor:
    """The logits in a model's output, start and end logits side by side."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    start, end = getattr(output, "start_logits", None), getattr(output, "end_logits", None)
    if isinstance(start, Tensor) and isinstance(end, Tensor):
        return torch.stack([start, end], dim=-1)
    raise ConfigError(
        f"evaluation.diagnostics = 'drift' compares logits, and the model gives a {type(output).__name__} without any; "
        "leave it out"
    ).about("evaluation.diagnostics", "drift", "a model that gives logits")


def _flat(scores: Tensor, batch: Batch) -> Tensor:
    """(rows, p): the last axis holds features, and every place before it is a row."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if scores.ndim == 1:
        return scores[:, None]
    if isinstance(mask, Tensor) and scores.shape[:-1] == mask.shape:
        return scores[mask.bool()]
    return scores.reshape(-1, scores.shape[-1])


def require_headline(record: Mapping[str, Any], target: float, task: str) -> None:
    """Refuse a target where metrics do not give the task's headline metric."""
    if (name := headline(task)) not in record:
        raise ConfigError(
            f"evaluation.target_accuracy = {target} needs {name!r}, which metrics does not return; return it, or leave the "
            "setting out"
        ).about("evaluation.target_accuracy", target, f"metrics with {name!r}")


def summary(
    records: Sequence[Mapping[str, Any]], settings: EvaluationConfig, task: str, *, secret_cohort: bool
) -> dict[str, Any]:
    """The record's `target` and `bandwidth`, each if its setting is set. task: see `headline`."""
    found: dict[str, Any] = {}
    if settings.target_accuracy is not None:
        found["target"] = _target(records, settings.target_accuracy, headline(task))
    if settings.bandwidth is not None:
        found["bandwidth"] = _time(records, settings.bandwidth, secret_cohort)
    return found


def _target(records: Sequence[Mapping[str, Any]], target: float, metric: str) -> dict[str, Any]:
    """The first evaluated round that reached the target, and the bytes sent by then. None if no round did."""
    reached = next(
        (place for place, row in enumerate(records) if row.get(metric) is not None and row[metric] >= target), None
    )
    upto = [] if reached is None else records[: reached + 1]
    sent = {name: sum(row[name] for row in upto) if upto else None for name in ("bytes_up", "bytes_down")}
    return {"metric": metric, "accuracy": target, "rounds": len(upto) or None, **sent}


def _time(records: Sequence[Mapping[str, Any]], bandwidth: float, secret_cohort: bool) -> dict[str, Any]:
    """Seconds that the run would take with clients computing at the same time, at the speed that was measured here.

    Clients train one after the other here, so a round's measured time, evaluation included, is divided by their number. Where
    this number is secret, so is the time, which would reveal it.
    """
    transfer = sum(row["transfer_seconds"] for row in records)
    compute = None if secret_cohort else sum(row["seconds"] / max(1, row["cohort"]) for row in records)
    return {
        "megabytes_per_second": bandwidth,
        "transfer_seconds": transfer,
        "compute_seconds": compute,
        "seconds": None if compute is None else transfer + compute,
    }


def transfer_seconds(record: Mapping[str, Any], megabytes_per_second: float) -> float:
    """Seconds that one client of the round sends and receives: bytes both ways / clients / bandwidth.

    All clients send at the same time over separate lines, as in FedARA (section V); a megabyte is 10^6 bytes.
    """
    clients = record["cohort"]
    moved = record["bytes_up"] + record["bytes_down"]
    return moved / clients / (megabytes_per_second * 1_000_000) if clients else 0.0
