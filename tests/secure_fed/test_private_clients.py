"""Client-level privacy by local noise, accounted for each client; and a clip norm that follows a quantile."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy import accounting
from privacy.mechanisms import COUNTER
from secure_fed.rounds.transport import Recording
from secure_fed.runs.store import read_checkpoint
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import NOISE, federation, one_round

C = NOISE["privacy.clip_norm"]
LOCAL = {**NOISE, "privacy.noise": "local", "privacy.noise_multiplier": 4.0}
ADAPTIVE = {**NOISE, "privacy.clip_quantile": 0.5}


def norm(tensors: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(tensor.square().sum()) for tensor in tensors.values()))


# Local noise.


@pytest.mark.parametrize("method", toys.METHODS)
def test_what_leaves_a_client_is_noised_and_short_beneath_the_noise(method: str) -> None:
    built = federation({**LOCAL, "method.name": method, "federation.rounds": 1}, 9)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    built.run()
    assert len(recording.exchanges) == 3
    for request, reply in recording.exchanges:
        sent = private_toys.dense(reply.contribution)
        assert not [member for _, member in reply.contribution.items() if not isinstance(member, torch.Tensor)]
        noise = private_toys.noise(sent, 4.0 * C, 9, "contribution", 0, request.pass_name, reply.client)
        beneath = norm({name: sent[name] - noise[name] for name in sent})
        assert 0 < beneath <= C * (1 + 1e-3)  # the released numbers are rounded
        assert norm(sent) > 10 * C
        others = private_toys.noise(sent, 4.0 * C, 9, "contribution", 0, request.pass_name, (reply.client + 1) % 3)
        assert norm({name: sent[name] - others[name] for name in sent}) > 10 * C, "noise of its own"


def test_every_client_is_counted_by_itself(tmp_path: Path) -> None:
    result = federation({**LOCAL, "federation.rounds": 4, "federation.cohort": 2, "privacy.participations": 4}).run(
        tmp_path / "run"
    )
    ledger = private_toys.own_ledger(tmp_path / "run")
    charged = private_toys.charges(ledger)
    assert len(charged) == 8
    assert {who for who, _ in charged} == {"client-0", "client-1", "client-2"}
    said = result.summary
    assert said["releases"] == max(ledger.charged(ledger.rows()[1].run).values())
    assert said["epsilon"] == said["epsilon_participants"] == accounting.epsilon(accounting.replaced(4.0), 4, 1e-3)
    assert "one client replaced by another" in said["privacy"]["adjacency"]


def test_a_target_is_met_by_local_noise_too() -> None:
    settings = {**LOCAL, "privacy.noise_multiplier": None, "privacy.epsilon": 5.0}
    said = federation(settings).run().summary
    assert 0.99 * 5 < said["epsilon"] <= 5
    central = federation({**settings, "privacy.noise": "central"}).run().summary
    assert said["noise_multiplier"] == pytest.approx(2 * central["noise_multiplier"], rel=1e-2)


def test_a_client_over_its_share_sits_out() -> None:
    built = federation({**LOCAL, "privacy.participations": 2, "federation.rounds": 4})
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    states = []
    built.callbacks.append(_Notes(states))
    result = built.run()
    by_round = [[reply for request, reply in recording.exchanges if request.round == round_] for round_ in range(4)]
    for replies in by_round[:2]:
        assert all(reply.weight == 1.0 and norm(private_toys.dense(reply.contribution)) > C for reply in replies)
    for replies in by_round[2:]:
        assert all(reply.weight == 0.0 and norm(private_toys.dense(reply.contribution)) == 0 for reply in replies)
    assert not toys.same(states[0], states[1])
    assert toys.same(states[1], states[2])
    assert toys.same(states[2], states[3])
    assert result.summary["releases"] == 2
    assert result.summary["epsilon"] == accounting.epsilon(accounting.replaced(4.0), 2, 1e-3)


class _Notes:
    def __init__(self, states: list[Tensors]) -> None:
        self.states = states

    def on_round_end(self, record: Any, state: Any) -> None:
        self.states.append(state.tensors)


def test_the_mean_is_over_those_who_take_part() -> None:
    """Two of three clients have releases left: the mean is a half of their sum, not a third."""
    built = federation(LOCAL, 2)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    watched = private_toys.Watched(built.assembly.server.method)
    built.assembly = replace(built.assembly, server=replace(built.assembly.server, method=watched))
    built.callbacks.append(watched)
    spent = {"client-1": 0}
    for client in built.assembly.clients:
        client._setup = replace(client._setup, allowance=lambda who, wanted, round_: spent.get(who, wanted))
    built.run()
    sent = [private_toys.dense(reply.contribution) for _, reply in recording.exchanges[:3]]
    mean = private_toys.dense(watched.seen[0][0]["change"])
    for name, tensor in mean.items():
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
    built = federation(
        {**ADAPTIVE, "privacy.clip_norm": start, "privacy.noise_multiplier": 0.01, "federation.rounds": 5}
    )
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run(tmp_path / "run")
    norms = [recording.exchanges[3 * round_][0].clip_norm for round_ in range(5)]
    assert norms[0] == start
    assert norms == sorted(norms, reverse=not grows)
    assert len(set(norms)) == 5
    checkpoint = read_checkpoint(tmp_path / "run")
    assert checkpoint is not None
    assert checkpoint.state.clip_norm == result.state.clip_norm not in norms
    assert result.summary["privacy"]["clip_norm"] == start
    assert "quantile 0.5" in result.summary["privacy"]["mechanism"]
    for request, reply in recording.exchanges:
        contribution = private_toys.dense(reply.contribution)
        assert float(contribution.pop(COUNTER)) in (0.5, -0.5)
        assert norm(contribution) <= request.clip_norm


def test_the_count_is_noised_with_the_sum_and_moves_the_clip_norm_as_published() -> None:
    """C' = C exp(-0.2 (b - g)), b from the noised count. The method gets no count, and at least the noise accounted for."""
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


def test_adapting_costs_nothing_beside_the_noise_multiplier() -> None:
    plain, adaptive = federation(NOISE).run().summary, federation(ADAPTIVE).run().summary
    for name in ("epsilon", "epsilon_participants", "releases", "noise_multiplier"):
        assert plain[name] == adaptive[name]


def test_a_diverged_client_counts_as_too_long(tmp_path: Path) -> None:
    poisoned = [toys.examples(client + 1, 6) for client in range(3)]
    for item in poisoned[0]:
        item["x"] = torch.full((6,), math.nan)
    seen = one_round(federation({**ADAPTIVE, "privacy.clip_norm": 100.0}, 1, train=poisoned))
    counts = [float(private_toys.dense(reply.contribution)[COUNTER]) for _, reply in seen.exchanges]
    assert counts == [-0.5, 0.5, 0.5]


def test_a_ledger_and_a_record_hold_nothing_of_the_cohort(tmp_path: Path) -> None:
    federation({**NOISE, "federation.cohort": 2}).run(tmp_path / "run")
    rows = private_toys.own_ledger(tmp_path / "run").rows()
    assert [row.body["note"] for row in rows if row.kind == "charge"] == [
        {"round": round_, "pass": "change"} for round_ in range(3)
    ]
    assert {row.body["who"] for row in rows if row.kind == "charge"} == {""}
    note = json.loads((tmp_path / "run" / "private" / "budget.json").read_text())
    assert note["head"]["row"] == rows[-1].id
