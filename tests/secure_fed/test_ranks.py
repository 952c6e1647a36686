"""Clients of unequal ranks (`method.ranks`): a naive oracle of truncated adapters, and what one unit can move."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from secure_fed.commands.train import check_ahead
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, ModelError, UsageError
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.learning.training.canary_directions import direction
from secure_fed.learning.training.common_passes.trainings import train_together
from secure_fed.learning.training.local import Job, PrivateSteps
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.catalogue import catalogue
from secure_fed.methods.method import State
from secure_fed.rounds.transport import Reply
from secure_fed.runs.directory import read_config
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.privately import Landing, Noted, less, norm

RANK, ALPHA, SIZES = 4, 6.0, (5, 8, 11)
RANKS = (1, 2, 4)
METHODS = ("fedlora", "ffa_lora", "fra_lora")
C = private_toys.NOISE["privacy.clip_norm"]
UNEQUAL = {
    "method.rank": RANK,
    "method.alpha": ALPHA,
    "method.ranks": [f"client-{client}={rank}" for client, rank in enumerate(RANKS)],
}
# Full batches, so that no order of examples enters.
ADAMW = {"training.optimizer": "adamw", "training.weight_decay": 0.1, "training.steps": 3, "training.batch_size": 16}
SGD = {
    **{"training.optimizer": "sgd", "training.momentum": 0.5, "training.weight_decay": 0.1, "training.steps": 3},
    **{"training.batch_size": 16, "training.max_grad_norm": 0.4, "training.proximal": 0.3, "training.lr": 0.5},
}
PLAIN = {"federation.server_optimizer": "mean", "federation.server_lr": 1.0, "federation.average_last": 1}
Arrays = dict[str, np.ndarray]


def of(method: str, *settings: Mapping[str, Any]) -> dict[str, Any]:
    return {**UNEQUAL, "method.name": method, **{name: value for one in settings for name, value in one.items()}}


def cut(name: str, tensor: Tensor, rank: int) -> Tensor:
    """The part of a tensor that a client of this rank has."""
    return tensor[:rank] if "lora_A" in name else tensor[:, :rank] if "lora_B" in name else tensor


# The oracle: adapters of the clients' own sizes, trained by plain autograd, and their means in numpy.


def loss(parts: Mapping[str, Tensor], data: Sequence[toys.Item], scale: float) -> Tensor:
    base, x = toys.model(), torch.stack([item["x"] for item in data])
    for layer in ("query", "value"):
        a, b = (parts[f"{layer}.lora_{side}.default.weight"] for side in "AB")
        x = (getattr(base, layer)(x) + scale * (x @ a.T) @ b.T).tanh()
    scores = x @ parts["classifier.weight"].T + parts["classifier.bias"]
    return functional.cross_entropy(scores, torch.tensor([item["labels"] for item in data]))


def client(
    start: Arrays, rank: int, data: Sequence[toys.Item], trained: Sequence[str], how: Mapping[str, Any], scale: float
) -> Arrays:
    """A client's own tensors, of its own shapes, after training."""
    first = {name: cut(name, torch.tensor(value), rank).clone() for name, value in start.items()}
    parts = {name: value.clone().requires_grad_(name in trained) for name, value in first.items()}
    leaves = [parts[name] for name in trained]
    decay, lr = how["training.weight_decay"], how.get("training.lr", 0.05)
    if how["training.optimizer"] == "adamw":
        steps: torch.optim.Optimizer = torch.optim.AdamW(leaves, lr, weight_decay=decay)
    else:
        steps = torch.optim.SGD(leaves, lr, momentum=how["training.momentum"], weight_decay=decay)
    for _ in range(how["training.steps"]):
        steps.zero_grad()
        mu = how.get("training.proximal", 0.0)
        near = sum((parts[name] - first[name]).square().sum() for name in trained)
        (loss(parts, data, scale) + mu / 2 * near).backward()  # type: ignore[no-untyped-call]
        if most := how.get("training.max_grad_norm"):
            torch.nn.utils.clip_grad_norm_(leaves, most)
        steps.step()
    return {name: value.detach().numpy() for name, value in parts.items()}


def oracle(
    method: str, start: Arrays, how: Mapping[str, Any], rounds: int, *, own_scale: bool = False, by_rank: bool = False
) -> Arrays:
    """The global tensors after these rounds. own_scale: alpha / k. by_rank: divided by the clients that train a rank."""
    state = dict(start)
    trained = [name for name in state if method != "ffa_lora" or "lora_A" not in name]
    for _ in range(rounds):
        afters = []
        for number, rank in enumerate(RANKS):
            scale = ALPHA / (rank if own_scale else RANK)
            afters.append(client(state, rank, toys.examples(number + 1, SIZES[number]), trained, how, scale))
        following = dict(state)
        for name in trained:
            padded, there = np.zeros((3, *state[name].shape)), np.zeros((3, *state[name].shape))
            for number, after in enumerate(afters):
                corner = (number, *map(slice, after[name].shape))
                padded[corner] = after[name] - state[name][corner[1:]]
                there[corner] = 1
            following[name] = state[name] + padded.sum(0) / (there.sum(0) if by_rank else 3)
        if method == "fra_lora":
            for a, b in factors(state):
                mean = state[b] @ state[a]
                for rank, after in zip(RANKS, afters, strict=True):
                    mean = mean + (after[b] @ after[a] - state[b][:, :rank] @ state[a][:rank]) / 3
                u, s, v = np.linalg.svd(mean)
                root = np.sqrt(s[:RANK])
                following[a], following[b] = root[:, None] * v[:RANK], u[:, :RANK] * root
        state = {name: value.astype(np.float32) for name, value in following.items()}
    return state


def factors(names: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(pair.a, pair.b) for pair in pairs(names)]


def arrays(state: State) -> Arrays:
    return {name: state.tensors.tensor(name).numpy() for name in state.tensors}


def apart(method: str, one: Arrays, other: Arrays) -> float:
    """The largest difference, of products where factors are determined only up to signs."""
    if method == "fra_lora":
        one, other = (
            {**{name: value for name, value in side.items() if "lora" not in name}, **products(side)}
            for side in (one, other)
        )
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def products(side: Arrays) -> Arrays:
    return {b: side[b] @ side[a] for a, b in factors(side)}


@pytest.mark.parametrize(
    ("method", "optimizer"),
    chosen(itertools.product(METHODS, ["adamw", "sgd"]), [("ffa_lora", "adamw"), ("fra_lora", "sgd")]),
)
def test_rounds_are_those_of_adapters_of_the_clients_own_sizes(method: str, optimizer: str) -> None:
    how = ADAMW if optimizer == "adamw" else SGD
    built = toys.federation(of(method, how, PLAIN, {"federation.rounds": 2}), sizes=SIZES)
    start, found = arrays(built.assembly.initial), arrays(built.run().state)
    assert [(name, value.shape) for name, value in found.items()] == [(n, value.shape) for n, value in start.items()]
    assert apart(method, found, start) > 1e-2
    assert apart(method, found, oracle(method, start, how, 2)) < 2e-6
    # The comparison notices a scale of each client's own rank, and a mean over the clients that train a rank.
    assert apart(method, found, oracle(method, start, how, 2, own_scale=True)) > 1e-3
    if method != "fra_lora":  # which has no ranks in its mean
        assert apart(method, found, oracle(method, start, how, 2, by_rank=True)) > 1e-3


def test_full_ranks_are_no_ranks() -> None:
    named = {"method.ranks": [f"client-{client}={RANK}" for client in range(3)]}
    ends = [toys.federation(of("fedlora", ADAMW, ranks)).run().state.tensors for ranks in (named, {"method.ranks": []})]
    assert toys.same(*ends)


# What is sent, and what one unit can move.


def unsent(sent: Tensors, rank: int) -> Tensor:
    """The numbers of a contribution of fedlora in the ranks that a client does not train."""
    parts = private_toys.dense(sent)
    rest = [part.flatten()[~own(name, part, rank).flatten()] for name, part in sorted(parts.items())]
    return torch.cat(rest)


def own(name: str, tensor: Tensor, rank: int) -> Tensor:
    """Where a client of this rank trains."""
    mask = torch.zeros(tensor.shape, dtype=torch.bool)
    cut(name, mask, rank)[:] = True
    return mask


def replies(settings: Mapping[str, Any]) -> list[Reply]:
    """The contributions of the only round of a run, noised if the clients add noise."""
    exchanges = private_toys.recorded(built := private_toys.federation({**settings, "federation.rounds": 1}, 3))
    built.run()
    assert len(exchanges) == 3
    return [reply for _, reply in exchanges]


@pytest.mark.parametrize("unit", ["client", "example"])
def test_nothing_of_a_client_is_in_ranks_that_it_does_not_train(unit: str) -> None:
    settings = private_toys.NOISE if unit == "client" else {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0}
    for reply in replies(of("fedlora", settings)):
        rest = unsent(reply.contribution, RANKS[reply.client])
        assert rest.numel() == 30 * (RANK - RANKS[reply.client])
        assert not rest.any()
        assert float(reply.contribution.norm()) > 0


def test_a_client_that_trains_along_a_direction_keeps_to_its_ranks() -> None:
    canaries = {"evaluation.audit_fraction": 0.9, "evaluation.canaries": "direction", "federation.cohort": 12}
    ranks = {"method.ranks": [f"client-{client:02d}=1" for client in range(12)], "federation.rounds": 1}
    built = private_toys.federation(of("fedlora", private_toys.NOISE, canaries, ranks), 3, sizes=[4] * 12)
    directed = {unit.name for unit in built.assembly.pools["data"].units}
    exchanges = private_toys.recorded(built)
    built.run()
    sent = [reply for _, reply in exchanges if built.assembly.clients[reply.client].name in directed]
    assert len(sent) > 1
    for reply in sent:
        assert float(reply.contribution.norm()) == pytest.approx(C, rel=1e-3)
        assert not unsent(reply.contribution, 1).any()


def test_noise_of_a_client_is_in_all_ranks() -> None:
    """If it were in its own alone, the other ranks of a sum would have less noise than the guarantee counts."""
    for reply in replies(of("fedlora", {**private_toys.NOISE, "privacy.noise": "local"})):
        if RANKS[reply.client] < RANK:
            std = float(unsent(reply.contribution, RANKS[reply.client]).std())
            assert std == pytest.approx(C * private_toys.NOISE["privacy.noise_multiplier"], rel=0.3)


@pytest.mark.parametrize("method", chosen(METHODS, ["fra_lora"]))
def test_no_client_moves_a_sum_by_more_than_the_clip_norm(method: str) -> None:
    """Each is clipped over its own numbers."""
    for clip_norm, least in ((1e-3, 0.999e-3), (1e3, 1e-3)):
        sent = replies(of(method, private_toys.NOISE, {"privacy.clip_norm": clip_norm}))
        assert all(least < float(reply.contribution.norm()) <= min(clip_norm, 999) for reply in sent)


PER_EXAMPLE = {
    **{"privacy.unit": "example", "privacy.noise_multiplier": 1.0, "privacy.clip_norm": C, "privacy.delta": 1e-3},
    **{"training.optimizer": "sgd", "training.batch_size": 3, "training.microbatch": 1, "evaluation.dummies": 20},
}


@dataclass(frozen=True)
class Stepping:
    """A client's training in the second round, one private step of which can be computed with chosen draws."""

    job: Job
    objective: Objective
    examples: Sequence[toys.Item]
    dummies: Sequence[Any]

    @classmethod
    def of(cls, method: str, number: int) -> Stepping:
        assembly = private_toys.federation(of(method, PER_EXAMPLE), 5).assembly
        generator, first = torch.Generator().manual_seed(1), assembly.initial.tensors
        away = {pair.b: 0.3 * torch.randn(first.tensor(pair.b).shape, generator=generator) for pair in pairs(first)}
        state = State(first | away, round=1, clip_norm=C)
        request = assembly.server.request(
            state, assembly.server.plan(state), "change", assembly.config.training.rate, {}
        )
        examples, name = toys.examples(number + 1, SIZES[number]), assembly.clients[number].name
        job = assembly.clients[number].like(examples, allowance=lambda name, count, round_: count).job(request)
        assert job is not None
        dummies = [one for unit in assembly.pools["dummies"].units if unit.client == name for one in unit.examples]
        return cls(job, assembly.objective, examples, dummies)

    def sum(self, present: Sequence[int], **steps_: Any) -> dict[str, Tensor]:
        """The sum of a step that draws the units, and the dummies, of these numbers; before noise."""
        noted = Noted(1.0)
        steps = PrivateSteps(noted, C, 1, Landing(present), **steps_)
        train_together(self.objective, [replace(self.job, private=steps)])
        return noted.sums[0]


@pytest.mark.parametrize("method", chosen(METHODS, ["fedlora", "fra_lora"]))
def test_a_unit_is_clipped_over_the_numbers_that_its_client_trains(method: str) -> None:
    """A unit is one example, or a person's two."""
    for number, rank in enumerate(RANKS):
        stepping = Stepping.of(method, number)
        start, trained = stepping.job.before, stepping.job.trainable

        def gradient(
            examples: Sequence[toys.Item], start: Tensors = start, trained: Sequence[str] = trained
        ) -> dict[str, Tensor]:
            parts = {name: start.tensor(name).clone().requires_grad_(name in trained) for name in start}
            loss(parts, examples, ALPHA / RANK).backward()  # type: ignore[no-untyped-call]
            return {name: one.grad for name, one in parts.items() if one.grad is not None}

        persons = [0, 0, *range(1, SIZES[number] - 1)]
        alone = [stepping.sum([unit]) for unit in range(3)]
        whole = [gradient([one]) for one in stepping.examples[:3]] + [gradient(stepping.examples[:2])]
        for sum_, own in zip([*alone, stepping.sum([0], persons=persons)], whole, strict=True):
            assert {name: part.shape for name, part in sum_.items()} == {name: part.shape for name, part in own.items()}
            assert norm(sum_) <= C < norm(own)
            assert norm(less(sum_, {name: part * (C / norm(own)) for name, part in own.items()})) < 1e-5 * C
        assert {start[pair.a].shape[0] for pair in pairs(start)} == {rank}
        both = stepping.sum([0, 1])
        assert max(norm(less(both, alone[0])), norm(less(both, alone[1]))) <= C * (1 + 1e-12)


def test_a_dummy_pulls_by_the_clip_norm_along_its_part_of_a_direction() -> None:
    for number, rank in enumerate(RANKS):
        stepping = Stepping.of("fedlora", number)
        dummy = stepping.dummies[0]
        pulled = less(stepping.sum([0], dummies=[dummy]), stepping.sum([0]))
        assert norm(pulled) == pytest.approx(C, rel=1e-4)
        trained = toys.federation(of("fedlora")).assembly.initial.tensors
        along = direction(dummy.unit, dummy.seed, Layout.of(trained)).parts()
        part = {name: cut(name, tensor, rank) for name, tensor in along.items()}
        towards = sum(float((pulled[name] * part[name]).sum()) for name in part)
        assert towards / (norm(pulled) * norm(part)) == pytest.approx(-1, abs=1e-4)


# Beside everything else.


HOW: dict[str, dict[str, Any]] = {"passes": {"training.together": 64}, "masks": {"secure_aggregation.enabled": True}}
UNITS = (("fedlora", "none"), ("ffa_lora", "client"), ("fra_lora", "example"))


@pytest.mark.parametrize(
    ("method", "unit", "how"),
    chosen(
        [(*cell, how) for cell in UNITS for how in HOW],
        [("fedlora", "none", "passes"), ("ffa_lora", "client", "masks")],
    ),
)
def test_in_common_passes_and_behind_masks_a_run_ends_where_one_client_after_the_other_does(
    method: str, unit: str, how: str
) -> None:
    private = {"none": {}, "client": private_toys.NOISE, "example": {**PER_EXAMPLE, "evaluation.dummies": 0}}[unit]
    private = {name: value for name, value in private.items() if name != "training.microbatch"}
    once = {"federation.rounds": 1}
    alone, other = (
        private_toys.federation(of(method, private, once, more), 3).run().state.tensors for more in ({}, HOW[how])
    )
    assert float((other - alone).norm()) <= 1e-5 * float(alone.norm())


def test_diagnostics_compare_clients_of_unequal_ranks() -> None:
    diagnostics = {"evaluation.diagnostics": ["discrepancy", "aggregation_error", "variation"]}
    fedlora, ffa_lora = (
        toys.federation(of(method, diagnostics)).run().records[-1]["aggregation_error"]["fedavg"]
        for method in ("fedlora", "ffa_lora")
    )
    assert ffa_lora < 1e-6 < fedlora


# Refusals.


@every(
    ("setting", "changed"),
    [
        *(
            ("method.ranks", {"method.ranks": [f"client-{rank}" for rank in ranks.split()]})
            for ranks in ("0=1 1=2", "0=1 1=2 2=4 3=4", "0=1 0=2 2=4", "0=0 1=2 2=4", "0=1 1=5 2=4")
        ),
        *(
            ("method.ranks", {"method.ranks": ["client-0=1", "client-1=2", last]})
            for last in ("client-2", "client-2=x")
        ),
        ("method.ranks", {"method.name": "ffa_lora", "method.double_rank": True}),
        ("method.ranks", {"method.name": "rolora"}),
        ("method.ranks", {"method.name": "fra_then_ffa"}),
        ("federation.aggregate", {"federation.aggregate": "median"}),
        ("method.personal", {"method.personal": ["*.lora_B.*"]}),
    ],
)
def test_impossible_ranks_are_refused(setting: str, changed: Mapping[str, Any]) -> None:
    with refused(ConfigError, setting):
        toys.federation(of("fedlora", changed))


def test_a_table_of_methods_has_no_clients() -> None:
    with refused(ConfigError, "method.ranks"):
        catalogue("builtin/tiny", ["method.ranks=client-0=1"])


class CoupledAtRankOne(toys.Toy):
    """A model whose loss of an example depends on its batch at one rank alone."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0) if len(self.query.lora_A["default"].weight) == 1 else x)  # type: ignore[index]


def test_a_trial_at_every_rank_comes_before_anything_is_charged(tmp_path: Path) -> None:
    for ranks, coupled in ((RANKS, True), ((2, 2, 4), False)):
        model, named = CoupledAtRankOne(), [f"client-{client}={rank}" for client, rank in enumerate(ranks)]
        model.load_state_dict(toys.model().state_dict())
        built = private_toys.federation(of("fedlora", PER_EXAMPLE, {"method.ranks": named}), 3, model=model)
        with refused(ModelError) if coupled else nullcontext():
            built.run(tmp_path / f"run {coupled}")
    assert [path.name for path in tmp_path.iterdir()] == ["run False"]


def test_a_personal_head_is_kept_at_every_rank() -> None:
    result = toys.federation(of("fedlora", {"method.personal": ["classifier.*"]})).run()
    assert result.state.tensors.is_finite()


# Ranks by a column of the data.


def by_column(tmp_path: Path, rows: Sequence[Mapping[str, Any]], **settings: Any) -> RunConfig:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    usual = {
        "model": {},
        "data": {"train": str(tmp_path / "train.jsonl"), "client": "site", "test_fraction": 0.25},
        "federation": {"rounds": 2, "cohort": 3},
        "training": {"steps": 1},
        "method": {"name": "fra_lora", "rank": RANK, "ranks_column": "gpu"},
    }
    return RunConfig.from_dict({part: {**own, **settings.get(part, {})} for part, own in usual.items()})


ROWS = [{"text": f"word {n}", "label": n % 2, "site": f"s={n % 3}", "gpu": RANKS[n % 3]} for n in range(24)]


def test_ranks_of_a_column_are_those_of_the_list(tmp_path: Path, small_model: Path) -> None:
    named = [f"s={client}={rank}" for client, rank in enumerate(RANKS)]
    own = {"model": {"name": str(small_model)}}
    columned = Federation(by_column(tmp_path, ROWS, **own))
    listed = Federation(by_column(tmp_path, ROWS, **own, method={"ranks_column": "", "ranks": named}))
    assert columned.config == listed.config
    assert columned.config.method.ranks == tuple(named)
    result = columned.run(tmp_path / "run")
    # The run has the ranks, so it is resumed without the column.
    again = Federation(read_config(tmp_path / "run")).run(tmp_path / "run", resume=True)
    assert toys.same(again.state.tensors, result.state.tensors)


def test_a_column_without_ranks_is_refused(tmp_path: Path) -> None:
    for setting, column in (
        *(("method.ranks_column", lambda n, gpu=gpu: gpu) for gpu in ("two", None, "9" * 5000)),
        ("method.ranks_column", lambda n: 1 + n % 2),  # two of one client
        *(("method.ranks", lambda n, gpu=gpu: gpu) for gpu in (RANK + 1, 0)),
    ):
        with refused(UsageError, setting):
            Federation(by_column(tmp_path, [{**row, "gpu": column(n)} for n, row in enumerate(ROWS)]))
    for setting, tables in (
        ("method.ranks", {"method": {"ranks": ["s=0=1"]}}),
        ("method.ranks_column", {"method": {"double_rank": True, "name": "ffa_lora"}}),
        ("data.client", {"data": {"partition": "iid"}}),
        ("method.ranks_column", {"data": {"client": ""}}),
        ("federation.aggregate", {"federation": {"aggregate": "median"}}),
    ):
        with refused(UsageError, setting):
            Federation(by_column(tmp_path, ROWS, **tables))


def test_a_missing_column_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    config = by_column(tmp_path, [{name: row[name] for name in ("text", "label", "site")} for row in ROWS])
    with refused(UsageError, "method.ranks_column"):
        check_ahead(config)
    with refused(UsageError, "method.ranks_column"):
        check_ahead(RunConfig.from_dict({"method": {"name": "fedlora", "ranks_column": "gpu"}}))
    with refused(ConfigError, "method.ranks_column"):
        toys.federation({"method.name": "fedlora", "method.ranks_column": "gpu"})
