"""FRA-LoRA with sketches: against FRA-LoRA with whole matrices, in runs, and the bytes sent."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secure_fed.config import MethodConfig, PrivacyConfig, RunConfig
from secure_fed.errors import ConfigError, MethodError
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import Pair, pairs
from secure_fed.methods import build
from secure_fed.methods.fra_lora import SKETCH, FraLora
from secure_fed.methods.fra_then_ffa import FraThenFfa
from secure_fed.methods.method import CHANGE, State
from secure_fed.rounds.transport import Recording
from secure_fed.tensors import sketch
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.secure_fed import private_toys, toys
from tests.secure_fed.private_toys import NOISE

RANK = 2
SKETCHED = {"method.name": "fra_lora", "method.transport_form": "sketch"}
HEAD = ["classifier.weight", "classifier.bias"]


class Wide(nn.Module):
    """`toys.Toy` with matrices large enough to be sketched, of either orientation."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 40)
        self.query = nn.Linear(40, 48)
        self.value = nn.Linear(48, 40)
        self.classifier = nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.classifier(self.value(self.query(self.embed(x).tanh()).tanh()).tanh())
        return scores


def wide() -> Wide:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Wide()


def federation(settings: Mapping[str, Any] | None = None, seed: int | None = None, clients: int = 3) -> Federation:
    """A federation of `clients` clients at rank 2: their mean change has rank 2 (clients + 1) at most."""
    sizes = [5 + 3 * client for client in range(clients)]
    own = {"federation.cohort": clients, **(settings or {})}
    return private_toys.federation(own, seed, sizes=sizes, model=wide())


def fra(name: str = "fra_lora", columns: int | None = None, **settings: Any) -> FraLora | FraThenFfa:
    own = MethodConfig(name=name, rank=RANK, alpha=3.0, transport_form="sketch", sketch=columns, **settings)
    method = build(RunConfig(method=own, privacy=PrivacyConfig(unit="client", epsilon=8.0)))
    assert isinstance(method, FraLora | FraThenFfa)
    return method


def started(method: FraLora | FraThenFfa) -> State:
    """A state whose B is not zero."""
    tensors = method.prepare(wide(), HEAD, 3)
    generator = torch.Generator().manual_seed(1)
    b = {pair.b: torch.randn(tensors[pair.b].shape, generator=generator) for pair in pairs(tensors)}
    return State(tensors | b)


def trained(state: State, seed: int, size: float = 0.1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    start = state.tensors
    return Tensors((n, start.tensor(n) + size * torch.randn(start[n].shape, generator=generator)) for n in start)


def mean_of(
    method: FraLora | FraThenFfa, state: State, pass_name: str, afters: list[Tensors], means: Mapping[str, Tensors]
) -> Tensors:
    total = PlainSum(method.layout(state, pass_name))
    for after in afters:
        total.add(method.contribute(pass_name, state.tensors, after, means))
    return total.total() * (1 / len(afters))


def means_of(method: FraLora | FraThenFfa, state: State, afters: list[Tensors]) -> dict[str, Tensors]:
    means: dict[str, Tensors] = {}
    for pass_name in method.plan(state).passes:
        means[pass_name] = mean_of(method, state, pass_name, afters, means)
    return means


def product(tensors: Tensors, pair: Pair) -> Tensor:
    return tensors.tensor(pair.b).double() @ tensors.tensor(pair.a).double()


def close(left: Tensors, right: Tensors, tolerance: float = 1e-5) -> bool:
    """Whether products and head agree. Factors are not compared: signs, and vectors of equal singular values, are arbitrary."""
    found = pairs(right)
    matrices = [(product(left, pair), product(right, pair)) for pair in found]
    factors = [name for pair in found for name in (pair.a, pair.b)]
    heads = [(left.tensor(name), right.tensor(name)) for name in right.without(factors)]
    return all(float((one - other).norm()) <= tolerance * float(other.norm()) for one, other in matrices + heads)


# Against whole matrices.


@pytest.mark.parametrize("name", ["fra_lora", "fra_then_ffa"])
@pytest.mark.parametrize("clients", [1, 3])
def test_where_the_mean_fits_nothing_is_lost(name: str, clients: int) -> None:
    """Three clients at rank 2, from a product of rank 2, need 2 (3 + 1) = 8 columns: the default."""
    method = fra(name)
    whole = replace(method, sketch=None)
    state = started(method)
    afters = [trained(state, seed) for seed in range(clients)]
    found = method.apply(state, means_of(method, state, afters))
    want = whole.apply(state, means_of(whole, state, afters))
    assert method.sketch == 8
    assert found.round == want.round == 1
    assert close(found.tensors, want.tensors)
    assert not close(found.tensors, state.tensors, 1e-2)
    assert method.reported(means_of(method, state, afters), found)["sketch_residual"] < 1e-5


def loss_of(method: FraLora | FraThenFfa, means: Mapping[str, Tensors], exact: Tensors) -> float:
    """The relative norm of the mean change's part that the two passes missed, computed from dense matrices."""
    lost = size = 0.0
    for name in means[SKETCH]:
        q, mean = sketch.basis(means[SKETCH].tensor(name)), exact.tensor(name).double()
        assert torch.allclose(means[CHANGE].tensor(name).double(), q.T @ mean, atol=1e-5)
        lost += float((mean - q @ (q.T @ mean)).square().sum())
        size += float(mean.square().sum())
    return math.sqrt(lost / size)


@pytest.mark.parametrize("name", ["fra_lora", "fra_then_ffa"])
def test_where_it_does_not_the_residual_says_how_much(name: str) -> None:
    """The estimate from a few columns is within a factor of 2 in each round, and within 15 % over 20 rounds."""
    method = fra(name, 6)
    whole, state = replace(method, sketch=None), started(method)
    truth, said = [], []
    for round_ in range(20):
        afters = [trained(state, 10 * round_ + client, 0.4) for client in range(5)]
        means, exact = means_of(method, state, afters), means_of(whole, state, afters)[CHANGE]
        truth.append(loss_of(method, means, exact))
        said.append(method.reported(means, state)["sketch_residual"])
        state = (
            whole.apply(state, {CHANGE: exact}) if name == "fra_lora" else replace(state, tensors=state.tensors * 1.01)
        )
        assert 0.1 < truth[-1] < 1
    assert sum(value**2 for value in said) == pytest.approx(sum(value**2 for value in truth), rel=0.15)
    assert all(0.5 < one / other < 2 for one, other in zip(said, truth, strict=True))


def test_ten_clients_of_equal_singular_values_in_two_ranks_of_columns() -> None:
    """With 80 equal directions, 16 columns lose sqrt(64 / 80) = .89 of the mean's norm; the report is within 10 % of that."""
    method = FraLora(replace(fra().adapter, rank=8), sketch=16)
    generator = torch.Generator().manual_seed(4)
    u, v = (torch.linalg.qr(torch.randn(side, 80, generator=generator))[0] for side in (120, 100))
    a, b = "query.lora_A.default.weight", "query.lora_B.default.weight"
    start = State(Tensors({a: torch.zeros(8, 100), b: torch.zeros(120, 8)}))
    afters = [Tensors({a: v[:, k : k + 8].T.contiguous(), b: u[:, k : k + 8].contiguous()}) for k in range(0, 80, 8)]
    means = means_of(method, start, afters)
    exact = means_of(FraLora(method.adapter), start, afters)[CHANGE]
    assert loss_of(method, means, exact) == pytest.approx(math.sqrt(64 / 80), rel=0.01)
    assert method.reported(means, start)["sketch_residual"] == pytest.approx(math.sqrt(64 / 80), rel=0.1)


def test_the_report_reads_nothing_but_sketches() -> None:
    method = fra()
    state = started(method)
    means = means_of(method, state, [trained(state, 1)])
    counted = {SKETCH: means[SKETCH] | {"clip.shorter": torch.tensor(0.1)}, CHANGE: means[CHANGE]}
    assert method.reported(counted, state) == method.reported(means, state)
    assert method.reported({CHANGE: means[CHANGE]}, state) == {}
    assert replace(method, sketch=None).reported({CHANGE: means[CHANGE]}, state) == {}


def test_nobody_s_change_is_no_change() -> None:
    method = fra()
    state = started(method)
    zeros: dict[str, Tensors] = {}
    for pass_name in method.plan(state).passes:
        sent = method.contribute(pass_name, state.tensors, state.tensors, zeros)
        assert sent.norm() == 0.0
        zeros[pass_name] = PlainSum(method.layout(state, pass_name)).total()
    assert method.reported(zeros, state) == {"sketch_residual": 0.0}
    assert close(method.apply(state, zeros).tensors, state.tensors, 1e-6)


def test_layouts_are_those_of_what_is_sent_and_smaller_than_whole_matrices() -> None:
    method, whole = fra(), FraLora(fra().adapter)
    state = started(method)
    means = means_of(method, state, [trained(state, 1)])
    assert method.plan(state).passes == (SKETCH, CHANGE)
    for pass_name in method.plan(state).passes:
        sent = method.contribute(pass_name, state.tensors, trained(state, 1), means)
        assert Layout.of(sent) == method.layout(state, pass_name)
        assert all(isinstance(member, Tensor) for member in sent.values())
    shapes = dict(method.layout(state, SKETCH).entries), dict(method.layout(state, CHANGE).entries)
    assert shapes[0] == {"query.delta": (48, 12), "value.delta": (40, 12)}
    assert shapes[1] == {"query.delta": (8, 40), "value.delta": (8, 48), HEAD[0]: (3, 40), HEAD[1]: (3,)}
    masked = sum(method.layout(state, pass_name).size for pass_name in (SKETCH, CHANGE))
    assert masked < 0.5 * whole.layout(state, CHANGE).size


def test_everybody_has_the_same_directions_and_every_matrix_and_round_others() -> None:
    method = fra(columns=3)
    state = started(method)
    one, two = (trained(state, seed) for seed in (1, 2))
    both = method.contribute(SKETCH, state.tensors, one, {}) + method.contribute(SKETCH, state.tensors, two, {})
    for pair in pairs(state.tensors):
        want = product(one, pair) + product(two, pair) - 2 * product(state.tensors, pair)
        seed = sketch.seed_of(f"{pair.module}.delta", state.tensors.tensor(pair.a), state.tensors.tensor(pair.b))
        omega = sketch.directions(want.shape[1], 3, seed)
        found = both.tensor(f"{pair.module}.delta").double()
        assert torch.allclose(found, 1.5 * want @ omega, atol=1e-4)
        other = sketch.seed_of(f"{pair.module}.delta", one.tensor(pair.a), one.tensor(pair.b))
        assert not torch.allclose(found, 1.5 * want @ sketch.directions(want.shape[1], 3, other), atol=1e-1)


# Refusals.


def test_a_sketch_that_saves_nothing_is_refused() -> None:
    most = {sides: sketch.most_columns(sides) for sides in ((48, 40), (40, 48))}
    assert most == {(48, 40): 19, (40, 48): 19}
    fra(columns=19).prepare(wide(), HEAD, 0)
    with pytest.raises(MethodError, match=r"method\.sketch = 20 .* of query, 48 x 40, .* method\.sketch to 19 or less"):
        fra(columns=20).prepare(wide(), HEAD, 0)
    with pytest.raises(MethodError, match=r"method\.sketch = 8 \(4 x method\.rank if not set\).* of query, 8 x 6"):
        fra().prepare(toys.model(), HEAD, 0)
    uneven = wide()
    uneven.value = nn.Linear(48, 20)
    with pytest.raises(MethodError, match=r"of value, 20 x 48, .* method\.sketch to 12 or less"):
        fra(columns=13).prepare(uneven, HEAD, 0)
    with pytest.raises(MethodError, match=r"of query, 8 x 4, .*leave it out of method\.target_modules"):
        fra(target_modules=("query",)).prepare(Narrow(), HEAD, 0)
    with pytest.raises(MethodError, match=r"method\.sketch = 8 .*transport_form = 'dense'"):
        toys.federation(SKETCHED)


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(4, 8)
        self.classifier = nn.Linear(8, 3)


def test_settings_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method\.sketch = 3 has no effect here.*transport_form = 'sketch'"):
        toys.config({"method.name": "fra_lora", "method.sketch": 3})
    for name in ("momentum", "adam"):
        with pytest.raises(ConfigError, match=rf"server_optimizer = '{name}'.*transport_form = 'dense'"):
            toys.config({**SKETCHED, "federation.server_optimizer": name})
    with pytest.raises(ConfigError, match=r"transport_form = 'sketch' has no effect .*fra_lora and fra_then_ffa"):
        build(MethodConfig(name="ffa_lora", transport_form="sketch"))


def test_settings_reach_the_methods() -> None:
    assert fra(columns=5).sketch == fra("fra_then_ffa", 5).sketch == 5
    assert fra().sketch == 4 * RANK
    assert build(MethodConfig(name="fra_lora")) == FraLora(replace(fra().adapter, rank=8, alpha=16.0))
    private = PrivacyConfig(unit="client", epsilon=8.0, delta=1e-5)
    assert build(RunConfig(method=MethodConfig(name="fra_lora", denoise="shrink"), privacy=private)).summed


def test_personal_factors_are_refused_and_a_personal_head_stays() -> None:
    with pytest.raises(MethodError, match=r"method\.personal"):
        federation({**SKETCHED, "method.personal": ["query.lora_A*"]})
    result = federation({**SKETCHED, "method.personal": ["classifier"]}).run()
    start = federation(SKETCHED).assembly.initial.tensors
    assert all(torch.equal(result.state.tensors.tensor(name), start.tensor(name)) for name in HEAD)
    assert all(record["sketch_residual"] < 1e-4 for record in result.records)


# Rounds of a federation.


@pytest.mark.parametrize("settings", [{}, {"federation.weighting": "examples"}, {"federation.server_lr": 0.3}], ids=str)
def test_a_run_by_sketches_that_fit_is_the_run_by_whole_matrices(settings: dict[str, Any]) -> None:
    found, want = (federation({**settings, **own}).run() for own in (SKETCHED, {"method.name": "fra_lora"}))
    assert close(found.state.tensors, want.state.tensors, 1e-4)
    assert not close(want.state.tensors, federation(SKETCHED).assembly.initial.tensors, 1e-2)
    assert found.summary["releases"] == 2 * want.summary["releases"]
    for record, other in zip(found.records, want.records, strict=True):
        assert record["accuracy"] == other["accuracy"]
        assert record["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
        assert record["sketch_residual"] < 1e-4
        assert "sketch_residual" not in other


def test_six_clients_do_not_fit_into_a_sketch_for_three() -> None:
    settings = {**SKETCHED, "training.steps": 4}
    narrow = federation(settings, clients=6).run().records
    assert all(0.02 < record["sketch_residual"] < 1 for record in narrow)
    enough = federation({**settings, "method.sketch": 14}, clients=6).run().records
    assert all(record["sketch_residual"] < 1e-4 for record in enough)


def test_the_order_of_replies_is_nothing_to_the_state() -> None:
    class Shuffled:
        def __init__(self, inner: Any) -> None:
            self.inner, self.rng = inner, random.Random(1)

        def exchange(self, requests: Any) -> Any:
            replies = list(self.inner.exchange(requests))
            self.rng.shuffle(replies)
            return iter(replies)

    built = federation(SKETCHED)
    built.assembly = replace(built.assembly, transport=Shuffled(built.assembly.transport))
    assert close(built.run().state.tensors, federation(SKETCHED).run().state.tensors, 1e-4)


def test_it_switches_to_one_pass_with_ffa() -> None:
    settings = {**SKETCHED, "method.name": "fra_then_ffa", "method.switch_round": 2, "federation.rounds": 4}
    built = federation(settings)
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    found = built.run()
    whole = federation({**settings, "method.transport_form": "dense"}).run()
    passes = [(request.round, request.pass_name) for request, _ in recording.exchanges]
    assert list(dict.fromkeys(passes)) == [(0, SKETCH), (0, CHANGE), (1, SKETCH), (1, CHANGE), (2, CHANGE), (3, CHANGE)]
    assert close(found.state.tensors, whole.state.tensors, 1e-4)
    assert ["sketch_residual" in record for record in found.records] == [True, True, False, False]
    for pair in pairs(found.state.tensors):
        a = found.state.tensors.tensor(pair.a)
        assert torch.allclose(a @ a.T, torch.eye(RANK), atol=1e-5)


@pytest.mark.parametrize("method", chosen(["fra_lora", "fra_then_ffa"], ["fra_then_ffa"]))
def test_a_run_that_is_resumed_ends_in_the_same_bits(method: str, tmp_path: Path) -> None:
    settings = {**SKETCHED, "method.name": method, "federation.rounds": 4}
    settings |= {"method.switch_round": 3} if method == "fra_then_ffa" else {}
    whole = federation(settings).run()

    class KilledError(Exception):
        pass

    @dataclass
    class Dies:
        inner: Any
        asked: int = 0

        def exchange(self, requests: Any) -> Any:
            self.asked += 1
            if self.asked == 4:  # the second pass of the second round
                raise KilledError
            return self.inner.exchange(requests)

    dying = federation(settings)
    dying.assembly = replace(dying.assembly, transport=Dies(dying.assembly.transport))
    with pytest.raises(KilledError):
        dying.run(tmp_path / "run")
    resumed = federation(settings).run(tmp_path / "run", resume=True)
    assert toys.same(resumed.state.tensors, whole.state.tensors)
    assert toys.without_time(resumed.records) == toys.without_time(whole.records)


def test_a_client_that_diverged_is_out_of_both_passes() -> None:
    sick = [toys.examples(client + 1, 6) for client in range(3)]
    for item in sick[1]:
        item["x"] = torch.full((6,), math.nan)
    built = private_toys.federation({**SKETCHED, "federation.cohort": 3}, train=sick, model=wide())
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    result = built.run()
    assert [record["rejected"] for record in result.records] == [["client-1"]] * 3
    assert {reply.client for request, reply in recording.exchanges if request.pass_name == CHANGE} == {0, 2}
    assert all(record["sketch_residual"] < 1e-4 for record in result.records)


# The bytes sent.


def test_contributions_that_cannot_stay_in_factors_are_smaller_as_sketches() -> None:
    """Contributions with local noise are dense. Without masks and noise, factors are smaller than sketches."""
    local = {**NOISE, "privacy.noise": "local", "federation.rounds": 1}
    sizes = []
    for form in ("sketch", "dense"):
        built = federation({**local, "method.name": "fra_lora", "method.transport_form": form})
        recording = Recording(built.assembly.transport)
        built.assembly = replace(built.assembly, transport=recording)
        said = built.run().summary
        assert said["bytes_up"] == sum(reply.contribution.wire_size for _, reply in recording.exchanges)
        sizes.append(said["bytes_up"])
    assert sizes[0] < 0.6 * sizes[1]
    open_ = [federation(settings).run().summary["bytes_up"] for settings in (SKETCHED, {"method.name": "fra_lora"})]
    assert open_[0] > open_[1]


def test_behind_masks_a_sketch_is_smaller_and_the_state_the_same() -> None:
    """Up to the rounding to fixed point in a masked sum."""
    masked = {"method.name": "fra_lora", "secure_aggregation.enabled": True}
    found, whole = (federation({**masked, "method.transport_form": form}).run() for form in ("sketch", "dense"))
    assert close(found.state.tensors, whole.state.tensors, 1e-3)
    assert found.summary["bytes_up"] < 0.6 * whole.summary["bytes_up"]
    assert all(record["sketch_residual"] < 1e-4 for record in found.records)
