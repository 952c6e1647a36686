"""Client-level privacy, with noise on the sum or on contributions, cohorts of secret sizes, and a clip norm that adapts."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy import accounting
from privacy.entropy import KeyedEntropy, SeededEntropy, SystemEntropy
from privacy.mechanisms import COUNTER
from privacy.participation import Poisson
from privacy.plan import Plan
from secure_fed.errors import ConfigError, DataError
from secure_fed.methods.method import State
from secure_fed.runs.store import read_checkpoint
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import EXAMPLE, NOISE, TARGET, federation, one_round, recorded
from tests.secure_fed.privately import less, norm

C = NOISE["privacy.clip_norm"]
Dense = dict[str, Tensor]


def of(method: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings with `method`. By default fra_then_ffa switches in the middle of a short run."""
    return {**settings, "method.name": method}


def close(left: Dense, right: Dense, atol: float) -> bool:
    assert left.keys() == right.keys()
    return all(torch.allclose(left[name].double(), right[name].double(), rtol=0, atol=atol) for name in left)


def planned(settings: dict[str, Any]) -> Plan:
    plan = federation(settings).assembly.protection.plan
    assert plan is not None
    return plan


def test_a_run_keeps_to_its_target() -> None:
    built = federation(of("fra_lora", {**TARGET, "federation.rounds": 2}))
    runs = [built.run() for _ in range(2)]
    said = runs[0].summary
    assert 0.99 * 8 < said["epsilon"] <= min(8, said["epsilon_participants"])
    assert (said["unit"], said["releases"], said["rounds"], said["delta"]) == ("client", 2, 2, 1e-3)
    assert said["sampling_rate"] == pytest.approx(2 / 3)
    assert said["privacy"]["private"] is True
    assert "NOT PRIVATE" not in said["privacy_statement"]
    assert said["ended_early"] is None
    assert runs[0].state.tensors.is_finite()
    assert not toys.same(runs[0].state.tensors, runs[1].state.tensors), "one seed, and the noise is another"


def test_injected_noise_is_repeatable_and_is_called_what_it_is() -> None:
    runs = [federation(of("fra_then_ffa", {**NOISE, "method.dropout": 0.5}), seed).run() for seed in (5, 5, 6)]
    assert toys.same(runs[0].state.tensors, runs[1].state.tensors)
    assert toys.without_time(runs[0].records) == toys.without_time(runs[1].records)
    assert not toys.same(runs[0].state.tensors, runs[2].state.tensors)
    assert runs[0].summary["privacy"]["private"] is False
    assert runs[0].summary["privacy_statement"].startswith("NOT PRIVATE")


@pytest.mark.parametrize("source", [KeyedEntropy(bytes(32)), SystemEntropy, SeededEntropy, 5], ids=str)
def test_noise_of_a_key_that_somebody_holds_is_not_called_private(source: Any) -> None:
    with refused(ConfigError, "entropy"):
        toys.federation(NOISE, entropy=source)


def test_a_run_within_a_run_is_refused_and_a_second_after_it_is_not() -> None:
    """Two runs of one federation at a time would be charged as one."""

    class Again:
        def on_round_end(self, record: Any, state: Any) -> None:
            with refused(ConfigError, "run"):
                built.run()

    built = federation(NOISE, callbacks=[Again()])
    assert built.run().summary["releases"] == built.run().summary["releases"] == 3


def test_a_state_of_another_federation_is_exported_under_no_guarantee_of_this_one(tmp_path: Path) -> None:
    seen: list[State] = []

    class Seen:
        def on_round_end(self, record: Any, state: State) -> None:
            seen.append(state)

    built = federation(NOISE, callbacks=[Seen()])
    result = built.run()
    for number, state in enumerate((built.assembly.initial, seen[0], result.state)):
        assert "differential privacy" in (built.export(state, tmp_path / f"{number}") / "README.md").read_text()
    for other in (toys.federation().run().state, replace(result.state)):
        with refused(ConfigError, "state"):
            built.export(other, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_data_set_that_shrinks_after_its_noise_was_planned_trains_no_more() -> None:
    """Each of the examples that are left would be drawn with a larger probability."""
    train = [toys.examples(client, 6) for client in range(3)]
    built = federation({**EXAMPLE, "privacy.noise_multiplier": 1.0, "federation.cohort": 3}, train=train)
    del train[1][2:]
    with refused(DataError, "train"):
        built.run()


def test_what_a_client_draws_in_training_is_secret_where_it_is_private() -> None:
    """Draws from the seed and the client's position would change for every client behind one that leaves."""
    for settings, repeated in ((NOISE, False), ({}, True)):
        assembly = federation({**settings, "method.dropout": 0.5}).assembly
        server, initial = assembly.server, assembly.initial
        request = server.request(initial, server.plan(initial), "change", 0.05, {})
        one, two = (assembly.clients[0].handle(request).contribution for _ in range(2))
        assert toys.same(one, two) == repeated


def test_who_takes_part_is_secret_and_without_privacy_seeded() -> None:
    def cohorts(settings: dict[str, Any]) -> list[list[int]]:
        server = federation(settings, sizes=[2] * 8).assembly.server
        return [server.draw(round_) for round_ in range(20)]

    poisson = {"federation.cohort": 4, "federation.sampling": "poisson"}
    secret, open_ = {**NOISE, **poisson}, poisson
    assert cohorts(secret) != cohorts(secret)
    assert cohorts(open_) == cohorts(open_)
    assert cohorts({**secret, "federation.sampling": "fixed"}) != cohorts({**secret, "federation.sampling": "fixed"})


# The means that a method receives.


def seed_of_cohort(size: int, clients: int = 3, rate: float = 2 / 3) -> int:
    """A seed whose first cohort has `size` clients."""
    sampler = Poisson(clients, rate)
    return next(
        seed for seed in range(100) if len(sampler.draw(SeededEntropy(seed).stream("cohort", 0).uniform)) == size
    )


@pytest.mark.parametrize(("method", "size"), [("fedlora", 1), ("fra_lora", 0), ("fra_lora", 3)])
def test_a_method_sees_the_noised_sum_over_the_expected_size_of_the_cohort(method: str, size: int) -> None:
    """A cohort of nobody releases noise, and its record tells of no fewer clients."""
    seed, z = seed_of_cohort(size), 1.0
    built = federation(of(method, {**NOISE, "federation.cohort": 2}), seed)
    seen = one_round(built)
    found, sent = private_toys.dense(seen.mean), [private_toys.dense(reply.contribution) for _, reply in seen.exchanges]
    noise = private_toys.noise(found, z * C, seed, "sum", 0, "change")
    mean = {name: sum((one[name] for one in sent), noise[name]) / 2 for name in found}
    assert len(sent) == size
    assert close(found, mean, 2.0**-18 * z * C)
    assert seen.noise_std == pytest.approx(z * C / 2)
    assert (seen.charged, seen.record["cohort"]) == ([(0, "change")], 2)
    assert not toys.same(seen.after.tensors, built.assembly.initial.tensors)


# Contributions of clients.


def test_no_contribution_is_longer_than_the_clip_norm() -> None:
    def sent(clip_norm: float, rounds: int) -> list[float]:
        settings = {**NOISE, "federation.rounds": rounds, "privacy.clip_norm": clip_norm}
        exchanges = recorded(built := federation(of("fra_lora", settings), 1))
        built.run()
        assert all(reply.weight == 1.0 and math.isnan(reply.loss) for _, reply in exchanges)
        return [norm(private_toys.dense(reply.contribution)) for _, reply in exchanges]

    short, free = sent(1e-3, 3), sent(1e3, 1)
    assert len(short) == 9
    assert max(short) <= 1e-3
    assert min(short) == pytest.approx(1e-3, rel=1e-5)
    assert 0.01 < min(free) <= max(free) < 10, "what is short enough is left as it is"


@pytest.mark.parametrize("bad", chosen([math.nan, math.inf], [math.nan]))
def test_a_client_that_diverged_sends_zeros_and_nothing_is_told_of_it(bad: float) -> None:
    poisoned = [toys.examples(1, 5), toys.examples(2, 8), toys.examples(3, 11)]
    for item in poisoned[1]:
        item["x"] = torch.full((6,), bad)
    exchanges = recorded(built := federation(of("fra_lora", NOISE), 4, train=poisoned))
    result = built.run()
    sent = [(reply.client, norm(private_toys.dense(reply.contribution))) for _, reply in exchanges]
    assert [length for client, length in sent if client == 1] == [0.0, 0.0, 0.0]
    assert all(length > 0 for client, length in sent if client != 1)
    healthy = federation(of("fra_lora", NOISE), 4).run()
    assert [_public(record) for record in result.records] == [_public(record) for record in healthy.records]
    assert result.state.tensors.is_finite()


def _public(record: dict[str, Any]) -> dict[str, Any]:
    """The record without its time and without test metrics, which are computed from the public state."""
    return {name: record[name] for name in record if name not in ("seconds", "accuracy", "macro_f1", "loss")}


def test_records_do_not_tell_how_many_took_part() -> None:
    records, drawn = [], []
    for size in (0, 1, 3):
        exchanges = recorded(
            built := federation(of("fra_lora", {**NOISE, "federation.cohort": 2}), seed_of_cohort(size))
        )
        records.append([_public(record) for record in built.run().records])
        drawn.append(sum(request.round == 0 for request, _ in exchanges))
    assert drawn == [0, 1, 3]
    assert records[0] == records[1] == records[2]
    names = {"round", "train_loss", "cohort", "rejected", "bytes_up", "bytes_down", "lr"}
    assert {name for record in records[0] for name in record} == names
    told = [(record["cohort"], record["rejected"], record["train_loss"]) for record in records[0]]
    assert told == [(2, [], None)] * 3


OTHERWISE = {"method.personal": ["classifier"], "privacy.clip_quantile": 0.5, "method.rank": 5}


@pytest.mark.parametrize(
    ("method", "settings"),
    chosen(itertools.product(toys.METHODS, [{}, OTHERWISE]), [("fra_then_ffa", OTHERWISE)]),
    ids=str,
)
def test_where_everybody_takes_part_the_expected_bytes_are_those_that_travelled(
    method: str, settings: dict[str, Any]
) -> None:
    exchanges = recorded(built := federation(of(method, {**NOISE, **settings})))
    for record in built.run().records:
        passed = [pair for pair in exchanges if pair[0].round == record["round"] - 1]
        assert record["bytes_up"] == sum(len(reply.contribution.to_bytes()) for _, reply in passed)
        assert record["bytes_down"] == sum(len(request.tensors.to_bytes()) for request, _ in passed)


LOCAL = {**NOISE, "privacy.noise": "local", "privacy.noise_multiplier": 4.0}
ADAPTIVE = {**NOISE, "privacy.clip_quantile": 0.5}


# Local noise.


def test_what_leaves_a_client_is_noised_and_short_beneath_the_noise() -> None:
    exchanges = recorded(built := federation({**LOCAL, "method.name": "fra_lora", "federation.rounds": 1}, 9))
    built.run()
    assert len(exchanges) == 3
    for request, reply in exchanges:
        sent = private_toys.dense(reply.contribution)
        assert not [member for _, member in reply.contribution.items() if not isinstance(member, torch.Tensor)]
        own, others = (
            norm(less(sent, private_toys.noise(sent, 4.0 * C, 9, "contribution", 0, request.pass_name, client)))
            for client in (reply.client, (reply.client + 1) % 3)
        )
        assert 0 < own <= C * (1 + 1e-3)  # the released numbers are rounded
        assert norm(sent) > 10 * C
        assert others > 10 * C, "noise of its own"


def test_every_client_is_counted_by_itself(tmp_path: Path) -> None:
    settings = {**LOCAL, "federation.rounds": 4, "federation.cohort": 2, "privacy.participations": 4}
    said = federation(settings).run(tmp_path / "run").summary
    ledger = private_toys.own_ledger(tmp_path / "run")
    charged = private_toys.charges(ledger)
    assert len(charged) == 8
    assert {who for who, _ in charged} == {"client-0", "client-1", "client-2"}
    assert said["releases"] == max(ledger.charged(ledger.rows()[1].run).values())
    assert said["epsilon"] == said["epsilon_participants"] == accounting.epsilon(accounting.replaced(4.0), 4, 1e-3)
    assert "one client replaced by another" in said["privacy"]["adjacency"]


def test_the_mean_is_over_those_who_take_part() -> None:
    """Two of three clients have releases left: the mean is a half of their sum, not a third."""
    built = federation(LOCAL, 2)
    spent = {"client-1": 0}
    for client in built.assembly.clients:
        client._setup = replace(client._setup, allowance=lambda who, wanted, round_: spent.get(who, wanted))
    seen = one_round(built)
    sent = [private_toys.dense(reply.contribution) for _, reply in seen.exchanges]
    for name, tensor in private_toys.dense(seen.mean).items():
        torch.testing.assert_close(tensor.double(), (sent[0][name] + sent[2][name]) / 2, rtol=1e-5, atol=1e-7)


# A clip norm that adapts.


def test_the_count_of_a_client_differs_by_a_half_from_that_without_its_data() -> None:
    """Else the count moves by one, twice the sensitivity for which its noise is made."""
    built = federation({**ADAPTIVE, "privacy.clip_norm": 1e-3})
    server, initial = built.assembly.server, built.assembly.initial
    plan = server.plan(initial)
    request = server.request(initial, plan, plan.passes[0], built.assembly.config.training.rate, {})
    client = built.assembly.clients[0]
    found = [one.handle(request).contribution for one in (client, client.like(()))]
    assert [float(one.tensor(COUNTER)) for one in found] == [-0.5, 0.0]
    assert found[1].norm() == 0.0


@pytest.mark.parametrize(("start", "grows"), [(1e-3, True), (10.0, False)])
def test_the_clip_norm_moves_towards_the_quantile(tmp_path: Path, start: float, grows: bool) -> None:
    quiet = {**ADAPTIVE, "privacy.clip_norm": start, "privacy.noise_multiplier": 0.01}
    exchanges = recorded(built := federation(quiet))
    result = built.run(tmp_path / "run")
    norms = [exchanges[3 * round_][0].clip_norm for round_ in range(3)]
    assert norms[0] == start
    assert norms == sorted(set(norms), reverse=not grows)
    checkpoint = read_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.state.clip_norm == result.state.clip_norm not in norms
    assert result.summary["privacy"]["clip_norm"] == start
    assert "quantile 0.5" in result.summary["privacy"]["mechanism"]
    for request, reply in exchanges:
        contribution = private_toys.dense(reply.contribution)
        assert float(contribution.pop(COUNTER)) in (0.5, -0.5)
        assert norm(contribution) <= request.clip_norm


def test_the_count_is_noised_with_the_sum_and_moves_the_clip_norm_as_published() -> None:
    """C' = C exp(-0.2 (b - g)), b from the noised count. The method gets no count, and at least the noise accounted for.

    Adapting costs nothing beside the noise multiplier.
    """
    assert planned(ADAPTIVE).epsilon() == planned(NOISE).epsilon()
    seed, z = 11, 1.0
    built = federation(ADAPTIVE, seed)
    seen = one_round(built)
    assert COUNTER not in dict(seen.mean.items())
    mechanism: Any = built.assembly.protection.mechanism
    stream = private_toys.SeededEntropy(seed).stream("sum", 0, "change")
    sent = [private_toys.dense(reply.contribution) for _, reply in seen.exchanges]
    count = sum(float(one[COUNTER]) for one in sent) + mechanism.count_std * float(stream.normal(()))
    assert seen.after.clip_norm == pytest.approx(C * math.exp(-0.2 * (count / 3 + 0.5 - 0.5)), rel=1e-4)
    z_vector = seen.noise_std * 3 / C
    assert z_vector > z
    assert 1 / z_vector**2 + 1 / (2 * mechanism.count_std) ** 2 == pytest.approx(1 / z**2)
    mean = private_toys.dense(seen.mean)
    for name in sorted(mean):
        noise = z_vector * C * torch.from_numpy(stream.normal(tuple(mean[name].shape)))
        expected = (torch.stack([one[name] for one in sent]).sum(0) + noise) / 3
        torch.testing.assert_close(mean[name], expected, rtol=0, atol=1e-6)


def test_a_diverged_client_counts_as_too_long(tmp_path: Path) -> None:
    poisoned = [toys.examples(client + 1, 6) for client in range(3)]
    for item in poisoned[0]:
        item["x"] = torch.full((6,), math.nan)
    seen = one_round(federation({**ADAPTIVE, "privacy.clip_norm": 100.0}, 1, train=poisoned))
    counts = [float(private_toys.dense(reply.contribution)[COUNTER]) for _, reply in seen.exchanges]
    assert counts == [-0.5, 0.5, 0.5]


def test_a_ledger_holds_nothing_of_the_cohort(tmp_path: Path) -> None:
    federation({**NOISE, "federation.cohort": 2}).run(tmp_path / "run")
    rows = private_toys.own_ledger(tmp_path / "run").rows()
    charges = [(row.body["who"], row.body["note"]) for row in rows if row.kind == "charge"]
    assert charges == [("", {"round": round_, "pass": "change"}) for round_ in range(3)]
    note = json.loads((tmp_path / "run" / "private" / "budget.json").read_text())
    assert note["head"]["row"] == rows[-1].id
