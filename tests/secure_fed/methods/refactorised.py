"""Shared by the tests of FedSVD, FedASK and FedPower: a state with non-zero B, and products B A formed densely."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.mechanisms import clip_factor
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.lora import pairs
from secure_fed.methods.method import Method, State
from secure_fed.tensors.sums import PlainSum
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed import toys
from tests.secure_fed.methods.test_fra_sketch import HEAD, wide

Matrices = dict[str, Tensor]


def started(method: Method) -> State:
    """A state whose B is not zero."""
    tensors = method.prepare(wide(), HEAD, 3)
    generator = torch.Generator().manual_seed(1)
    b = {pair.b: 0.3 * torch.randn(tensors[pair.b].shape, generator=generator) for pair in pairs(tensors)}
    return State(tensors | b)


def trained(method: Method, state: State, seed: int, size: float = 0.1) -> Tensors:
    """The plan's trainable tensors plus random changes, in place of local training."""
    generator = torch.Generator().manual_seed(seed)
    names = method.plan(state).trainable
    moved = ((n, state.tensors.tensor(n)) for n in names)
    return Tensors((n, tensor + size * torch.randn(tensor.shape, generator=generator)) for n, tensor in moved)


def means_of(method: Method, state: State, afters: Sequence[Tensors]) -> dict[str, Tensors]:
    """The mean of the clients' contributions in each pass, computed as a server does."""
    means: dict[str, Tensors] = {}
    for pass_name in method.plan(state).passes:
        total = PlainSum(method.layout(state, pass_name))
        for after in afters:
            total.add(method.contribute(pass_name, state.tensors, after, means))
        means[pass_name] = total.total() * (1 / len(afters))
    return means


def products(tensors: Tensors) -> Matrices:
    """The product B A of every adapted matrix, float64."""
    return {p.module: tensors.tensor(p.b).double() @ tensors.tensor(p.a).double() for p in pairs(tensors)}


def mean_products(state: State, afters: Sequence[Tensors]) -> Matrices:
    """The mean of the clients' products B A after training, for every adapted matrix."""
    clients = [products(state.tensors | after) for after in afters]
    return {module: torch.stack([client[module] for client in clients]).mean(0) for module in clients[0]}


def best(matrix: Tensor, rank: int) -> Tensor:
    u, s, vt = torch.linalg.svd(matrix)
    return u[:, :rank] * s[:rank] @ vt[:rank]


def turned(columns: Tensor) -> Tensor:
    """The Q of a QR decomposition of independent columns, with the signs that make R's diagonal positive."""
    q, r = torch.linalg.qr(columns)
    return q * r.diagonal().sign()


def close(found: Mapping[str, Tensor], want: Mapping[str, Tensor], tolerance: float = 1e-5) -> bool:
    assert found.keys() == want.keys()
    return all(float((found[n] - want[n]).norm()) <= tolerance * float(want[n].norm()) for n in want)


def has_orthonormal_rows(a: Tensor) -> bool:
    a = a.double()
    return bool(torch.allclose(a @ a.T, torch.eye(a.shape[0], dtype=torch.float64), atol=1e-6))


def noised(means: Mapping[str, Tensors], std: float) -> dict[str, Tensors]:
    generator = torch.Generator().manual_seed(7)
    return {
        pass_name: Tensors((n, mean.tensor(n) + std * torch.randn(mean[n].shape, generator=generator)) for n in mean)
        for pass_name, mean in means.items()
    }


def clipped_norms(method: Method, state: State, pass_name: str, means: Mapping[str, Tensors], c: float) -> list[float]:
    """The norms of the clipped contributions of clients whose changes grow from 1e-6 to 1e4."""
    found = []
    for seed, size in enumerate((1e-6, 1e-3, 0.3, 30.0, 1e4)):
        sent = method.contribute(pass_name, state.tensors, trained(method, state, seed, size), means)
        found.append((sent * clip_factor(sent.norm(), c)).norm())
    return found


class KilledError(Exception):
    """Stands in for the end of the process."""


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
    built: Federation = make()
    resumed = built.run(run, resume=True)
    assert toys.same(resumed.state.tensors, whole.state.tensors)
    assert toys.without_time(resumed.records) == toys.without_time(whole.records)
