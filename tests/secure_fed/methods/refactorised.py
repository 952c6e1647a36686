"""Shared by the tests of methods that refactor products: matrices of either orientation in a federation, and dense products."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods.method import Method, State
from secure_fed.rounds.engine import run_round
from secure_fed.rounds.transport import Recording
from secure_fed.tensors.tensors import Tensors
from tests.contracts.runs import KilledError
from tests.secure_fed import private_toys, toys

RANK = 2
HEAD = ["classifier.weight", "classifier.bias"]
GRADIENTS = {**private_toys.EXAMPLE, "privacy.noise_multiplier": 1.0}
Matrices = dict[str, Tensor]


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


def recorded(built: Federation) -> Recording:
    """Replace the federation's transport by one that records."""
    recording = Recording(built.assembly.transport)
    built.assembly = replace(built.assembly, transport=recording)
    return recording


def noised_round(
    built: Federation, seed: int, clip_norm: float
) -> tuple[Mapping[str, Tensors], Mapping[str, list[Any]]]:
    """One round of three clients: the mean and the exchanges of each pass.

    Each mean is asserted to be the sum of what the clients sent and noise of the pass's own, on every coordinate, over three.
    """
    recording, watched, charged = recorded(built), private_toys.Watched(built.assembly.method), list[tuple[int, str]]()
    server = replace(
        built.assembly.server, method=watched, charge=lambda round_, pass_name: charged.append((round_, pass_name))
    )
    run_round(built.assembly.initial, server, recording, built.config.training.rate)
    means, noise_std = watched.seen[0]
    assert charged == [(0, name) for name in means]
    assert noise_std == pytest.approx(clip_norm / 3)
    exchanges = {name: [one for one in recording.exchanges if one[0].pass_name == name] for name in means}
    for name, sent in exchanges.items():
        total = private_toys.dense(sent[0][1].contribution + sent[1][1].contribution + sent[2][1].contribution)
        noise = private_toys.noise(total, clip_norm, seed, "sum", 0, name)
        for part, tensor in total.items():
            assert torch.allclose(means[name].tensor(part).double(), (tensor + noise[part]) / 3, atol=2e-6 * clip_norm)
    return means, exchanges


def started(method: Method, size: float = 0.3) -> State:
    """A state whose B is not zero."""
    tensors = method.prepare(wide(), HEAD, 3)
    generator = torch.Generator().manual_seed(1)
    b = {pair.b: size * torch.randn(tensors[pair.b].shape, generator=generator) for pair in pairs(tensors)}
    return State(tensors | b)


def products(tensors: Tensors) -> Matrices:
    """The product B A of every adapted matrix, float64."""
    return {p.module: tensors.tensor(p.b).double() @ tensors.tensor(p.a).double() for p in pairs(tensors)}


def mean_products(state: State, afters: Sequence[Tensors]) -> Matrices:
    """The mean of the clients' products B A after training, for every adapted matrix."""
    clients = [products(state.tensors | after) for after in afters]
    return {module: torch.stack([client[module] for client in clients]).mean(0) for module in clients[0]}


def best(matrix: Tensor, rank: int = RANK) -> Tensor:
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    return u[:, :rank] * s[:rank] @ vt[:rank]


def turned(columns: Tensor) -> Tensor:
    """The Q of a QR decomposition of independent columns, with the signs that make R's diagonal positive."""
    q, r = torch.linalg.qr(columns)
    return q * r.diagonal().sign()


def close(found: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 1e-5) -> bool:
    assert found.keys() == want.keys()
    return all(float((found[n] - want[n]).norm()) <= tolerance * float(want[n].norm()) for n in want)


def agree(left: Tensors, right: Tensors, tolerance: float = 1e-5) -> bool:
    """Whether products and head agree. Factors are not compared: signs, and vectors of equal singular values, are arbitrary."""
    heads = ({name: side.tensor(name).double() for name in HEAD} for side in (left, right))
    return close(products(left), products(right), tolerance) and close(*heads, tolerance)


def has_orthonormal_rows(a: Tensor) -> bool:
    a = a.double()
    return bool(torch.allclose(a @ a.T, torch.eye(a.shape[0], dtype=torch.float64), atol=1e-6))


def noised(means: Mapping[str, Tensors], std: float) -> dict[str, Tensors]:
    generator = torch.Generator().manual_seed(7)
    return {
        pass_name: Tensors((n, mean.tensor(n) + std * torch.randn(mean[n].shape, generator=generator)) for n in mean)
        for pass_name, mean in means.items()
    }


@dataclass
class Dies:
    """A transport that raises KilledError at its exchange number `last`."""

    inner: Any
    last: int
    asked: int = 0

    def exchange(self, requests: Any) -> Any:
        self.asked += 1
        if self.asked == self.last:
            raise KilledError
        return self.inner.exchange(requests)


def resumes(make: Any, last: int, run: Path) -> None:
    """Asserts that a run killed at exchange number `last` and resumed ends bit-identical to an uninterrupted run."""
    whole, dying = make().run(), make()
    dying.assembly = replace(dying.assembly, transport=Dies(dying.assembly.transport, last))
    with pytest.raises(KilledError):
        dying.run(run)
    resumed = make().run(run, resume=True)
    assert toys.same(resumed.state.tensors, whole.state.tensors)
    assert toys.without_time(resumed.records) == toys.without_time(whole.records)
