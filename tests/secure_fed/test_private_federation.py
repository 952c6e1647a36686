"""Client-level privacy with noise on the sum: contributions are clipped, sums are noised, and cohort sizes stay secret."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.entropy import SeededEntropy
from privacy.sampling_and_turns import Poisson
from secure_fed.rounds.transport import Recording
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import NOISE, TARGET, federation, one_round

C = NOISE["privacy.clip_norm"]
Dense = dict[str, Tensor]


def of(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `method`. By default fra_then_ffa switches in the middle of a short run."""
    return {**settings, "method.name": method}


def close(left: Dense, right: Dense, atol: float) -> bool:
    assert left.keys() == right.keys()
    return all(torch.allclose(left[name].double(), right[name].double(), rtol=0, atol=atol) for name in left)


# Whole runs.


@pytest.mark.parametrize("method", chosen(toys.METHODS, ["fra_lora"]))
def test_every_method_keeps_to_its_target(method: str) -> None:
    runs = [federation(of(method, TARGET)).run() for _ in range(2)]
    for result in runs:
        said = result.summary
        assert 0.99 * 8 < said["epsilon"] <= 8
        assert said["epsilon_participants"] >= said["epsilon"]
        assert (said["unit"], said["releases"], said["rounds"], said["delta"]) == ("client", 3, 3, 1e-3)
        assert said["sampling_rate"] == pytest.approx(2 / 3)
        assert said["privacy"]["private"] is True
        assert "NOT PRIVATE" not in said["privacy_statement"]
        assert said["ended_early"] is None
        assert result.state.tensors.is_finite()
    assert not toys.same(runs[0].state.tensors, runs[1].state.tensors), "one seed, and the noise is another"


@pytest.mark.parametrize("method", toys.METHODS)
def test_injected_noise_is_repeatable_and_is_called_what_it_is(method: str) -> None:
    runs = [federation(of(method, TARGET), seed).run() for seed in (5, 5, 6)]
    assert toys.same(runs[0].state.tensors, runs[1].state.tensors)
    assert toys.without_time(runs[0].records) == toys.without_time(runs[1].records)
    assert not toys.same(runs[0].state.tensors, runs[2].state.tensors)
    for result in runs:
        assert result.summary["privacy"]["private"] is False
        assert result.summary["privacy_statement"].startswith("NOT PRIVATE")


def test_who_takes_part_is_secret_and_without_privacy_seeded() -> None:
    def cohorts(settings: dict[str, Any]) -> list[list[int]]:
        server = federation(settings, sizes=[2] * 8).assembly.server
        return [server.draw(round_) for round_ in range(20)]

    poisson = {"federation.cohort": 4, "federation.sampling": "poisson"}
    secret, open_ = {**NOISE, **poisson}, poisson
    assert cohorts(secret) != cohorts(secret)
    assert cohorts(open_) == cohorts(open_)
    assert cohorts({**secret, "federation.sampling": "fixed"}) != cohorts({**secret, "federation.sampling": "fixed"})


def test_a_cohort_of_fixed_size_is_counted_without_replacement() -> None:
    said = federation({**TARGET, "federation.sampling": "fixed"}).run().summary
    assert 0.99 * 8 < said["epsilon"] <= min(8, said["epsilon_participants"])
    assert "replaced by another" in said["privacy"]["adjacency"]
    assert "Renyi" in said["privacy"]["accountant"]
    assert "without replacement" in said["privacy"]["sampling"]
    poisson = federation(TARGET).run().summary
    assert said["noise_multiplier"] > 1.2 * poisson["noise_multiplier"], "who is replaced moves the sum by 2 C"


# The means that a method receives.


def seed_of_cohort(size: int, clients: int = 3, rate: float = 2 / 3) -> int:
    """A seed whose first cohort has `size` clients."""
    sampler = Poisson(clients, rate)
    return next(
        seed for seed in range(100) if len(sampler.draw(SeededEntropy(seed).stream("cohort", 0).uniform)) == size
    )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("method", ["fedlora", "fra_lora"])
def test_a_method_sees_the_noised_sum_over_the_expected_size_of_the_cohort(method: str, size: int) -> None:
    seed, z = seed_of_cohort(size), 1.0
    settings = of(method, {**NOISE, "federation.cohort": 2})
    seen = one_round(federation(settings, seed))
    sent = [private_toys.dense(reply.contribution) for _, reply in seen.exchanges]
    total = {name: torch.stack([one[name] for one in sent]).sum(0) for name in sent[0]}
    noise = private_toys.noise(total, z * C, seed, "sum", 0, "change")
    noised = {name: total[name] + noise[name] for name in total}
    mean = private_toys.dense(seen.mean)
    rounding = 2.0**-18 * z * C
    assert len(sent) == size
    assert close(mean, {name: tensor / 2 for name, tensor in noised.items()}, rounding)
    assert seen.noise_std == pytest.approx(z * C / 2)
    assert seen.charged == [(0, "change")]
    # The comparison notices a division by the drawn size, noise of another scale, and no noise.
    if size != 2:
        assert not close(mean, {name: tensor / size for name, tensor in noised.items()}, rounding)
    for factor in (0.0, 0.9, 1.1):
        assert not close(mean, {name: (total[name] + factor * noise[name]) / 2 for name in total}, rounding)


@pytest.mark.parametrize("method", toys.METHODS)
def test_an_empty_cohort_releases_noise_all_the_same(method: str) -> None:
    built = federation(of(method, {**NOISE, "method.denoise": "none"} if "fra" in method else NOISE), 3)
    seen = one_round(built, sampler=private_toys.Nobody(3, 0.5))
    zeros = {name: torch.zeros(tuple(tensor.shape)) for name, tensor in private_toys.dense(seen.mean).items()}
    noise = private_toys.noise(zeros, C, 3, "sum", 0, "change")
    assert seen.exchanges == []
    assert seen.charged == [(0, "change")]
    assert close(private_toys.dense(seen.mean), {name: tensor / 1.5 for name, tensor in noise.items()}, 1e-6)
    assert not toys.same(seen.after.tensors, built.assembly.initial.tensors)
    assert seen.record["cohort"] == 2


def test_an_empty_cohort_is_charged() -> None:
    built = federation({**NOISE, "federation.cohort": 2})
    built.assembly = replace(
        built.assembly, server=replace(built.assembly.server, sampler=private_toys.Nobody(3, 2 / 3))
    )
    result = built.run()
    assert result.summary["releases"] == 3
    assert [record["cohort"] for record in result.records] == [2, 2, 2]


# Contributions of clients.


@pytest.mark.parametrize("method", toys.METHODS)
def test_no_contribution_is_longer_than_the_clip_norm(method: str) -> None:
    def sent(clip_norm: float, **settings: Any) -> list[float]:
        built = federation(of(method, {**NOISE, **settings, "privacy.clip_norm": clip_norm}), 1)
        recording = Recording(built.assembly.transport)
        built.assembly = replace(built.assembly, transport=recording)
        built.run()
        assert {reply.weight for _, reply in recording.exchanges} == {1.0}
        assert all(math.isnan(reply.loss) for _, reply in recording.exchanges)
        return [_norm(reply.contribution) for _, reply in recording.exchanges]

    short, free = sent(1e-3), sent(1e3, **{"federation.rounds": 1})
    assert len(short) == 9
    assert max(short) <= 1e-3
    assert min(short) == pytest.approx(1e-3, rel=1e-5)
    assert 0.01 < min(free) <= max(free) < 10, "what is short enough is left as it is"


def _norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in private_toys.dense(tensors).values()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("method", toys.METHODS)
def test_a_client_that_diverged_sends_zeros_and_nothing_is_told_of_it(method: str, bad: float) -> None:
    poisoned = [toys.examples(1, 5), toys.examples(2, 8), toys.examples(3, 11)]
    for item in poisoned[1]:
        item["x"] = torch.full((6,), bad)
    built = federation(of(method, NOISE), 4, train=poisoned)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run()
    theirs = [_norm(reply.contribution) for _, reply in recording.exchanges if reply.client == 1]
    assert theirs == [0.0, 0.0, 0.0]
    assert all(_norm(reply.contribution) > 0 for _, reply in recording.exchanges if reply.client != 1)
    healthy = federation(of(method, NOISE), 4).run()
    for record, other in zip(result.records, healthy.records, strict=True):
        assert _public(record) == _public(other)
    assert result.state.tensors.is_finite()


# Records.


def _public(record: dict[str, Any]) -> dict[str, Any]:
    """The record without its time and without test metrics, which are computed from the public state."""
    return {name: record[name] for name in record if name not in ("seconds", "accuracy", "macro_f1", "loss")}


@pytest.mark.parametrize("method", toys.METHODS)
def test_records_do_not_tell_how_many_took_part(method: str) -> None:
    records, drawn = [], []
    for size in (0, 1, 3):
        built = federation(of(method, {**NOISE, "federation.cohort": 2}), seed_of_cohort(size))
        recording = Recording(built.assembly.transport)
        built.assembly = replace(built.assembly, transport=recording)
        records.append([_public(record) for record in built.run().records])
        drawn.append(sum(request.round == 0 for request, _ in recording.exchanges))
    assert drawn == [0, 1, 3]
    assert records[0] == records[1] == records[2]
    assert {name for record in records[0] for name in record} == {
        *("round", "train_loss", "cohort", "rejected", "bytes_up", "bytes_down", "lr")
    }
    assert [(record["cohort"], record["rejected"], record["train_loss"]) for record in records[0]] == [
        (2, [], None)
    ] * 3


OTHERWISE: list[dict[str, Any]] = [
    {"method.personal": ["classifier"]},
    {"privacy.clip_quantile": 0.5},
    {"method.rank": 5},
]


@pytest.mark.parametrize(
    ("method", "settings"),
    chosen(
        itertools.product(toys.METHODS, [{}, *OTHERWISE]),
        [*((method, {}) for method in toys.METHODS), *(("fra_then_ffa", settings) for settings in OTHERWISE)],
    ),
    ids=str,
)
def test_where_everybody_takes_part_the_expected_bytes_are_those_that_travelled(
    method: str, settings: dict[str, Any]
) -> None:
    built = federation(of(method, {**NOISE, **settings}))
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    for record in built.run().records:
        passed = [pair for pair in recording.exchanges if pair[0].round == record["round"] - 1]
        assert record["bytes_up"] == sum(len(reply.contribution.to_bytes()) for _, reply in passed)
        assert record["bytes_down"] == sum(len(request.tensors.to_bytes()) for request, _ in passed)
