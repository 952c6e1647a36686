"""A small training loop as a user writes it, and the expected result of its private steps, computed one example at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from privacy.entropy import SeededEntropy, Stream
from secure_fed.private import Budget, Private, _wrapped, wrap

EXAMPLES, CLASSES = 24, 3
REHEARSAL = (
    12  # batches: each of eight examples alone, the eight together, and two halves of a large batch and that batch
)
BUDGET = Budget(epsilon=4.0, delta=1e-2, steps=6, clip_norm=0.5)
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), *layers, nn.Linear(8, CLASSES))


class Tied(nn.Module):
    """A model whose output layer shares its embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words, self.out = nn.Embedding(CLASSES, 5), nn.Linear(5, CLASSES, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(torch.tanh(self.words(x.argmax(1) % CLASSES)))
        return found


def data(examples: int = EXAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(examples, 5, generator=generator)
    return TensorDataset(x, torch.arange(examples) % CLASSES)


def state(model: nn.Module) -> list[Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def same(before: list[Tensor], model: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def mean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y)


def summed(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return cross_entropy(model(x), y, reduction="sum")


def loader(batch_size: int = 8, examples: int = EXAMPLES) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data(examples), batch_size=batch_size, shuffle=True)


def wrapped(model: nn.Module, seed: int | None = 0, *, batch_size: int = 8, budget: Budget = BUDGET) -> Private:
    """The model wrapped with plain SGD at a learning rate of 1. seed: of noise and sampling; None: the operating system's."""
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=1.0)
    if seed is None:
        return wrap(model, optimizer, loader(batch_size), budget)
    return _wrapped(model, optimizer, loader(batch_size), budget, SeededEntropy(seed))


def batches(private: Private) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's batches, epoch after epoch, until the budget's steps are spent."""
    while private.spent().steps < private.spent().planned:
        yield from private.loader


def train(private: Private, loss: Loss = mean) -> list[list[Tensor]]:
    """Runs a whole loop; returns the parameters before the first step and after each. Rehearsals must not move them."""
    noted = [state(private.model)]
    for x, y in batches(private):
        before = private.spent().steps
        private.optimizer.zero_grad()
        loss(private.model, x, y).backward()
        private.optimizer.step()
        if private.spent().steps == before:
            assert same(noted[-1], private.model)
        else:
            noted.append(state(private.model))
    return noted


def oracle(
    model: nn.Module, loss: Loss, budget: Budget, seed: int, batch_size: int, multiplier: float
) -> list[list[Tensor]]:
    """The parameters after each DP-SGD step with a learning rate of 1, by plain autograd, one example at a time."""
    coins, noise = SeededEntropy(seed).stream("batches"), SeededEntropy(seed).stream("steps")
    noise.words(4)
    x, y = data().tensors
    noted = []
    assert budget.steps is not None
    for _ in range(budget.steps):
        drawn = (torch.from_numpy(coins.uniform(len(x))) < batch_size / len(x)).nonzero().flatten().tolist()
        total = {name: torch.zeros(one.shape, dtype=torch.float64) for name, one in model.named_parameters()}
        for i in drawn:
            model.zero_grad()
            loss(model, x[i : i + 1], y[i : i + 1]).backward()
            found = {name: one.grad.double() for name, one in model.named_parameters() if one.grad is not None}
            norm = float(sum(part.square().sum() for part in found.values())) ** 0.5
            for name, part in found.items():
                total[name] += part * min(1.0, budget.clip_norm / norm)
        _step(model, total, noise, multiplier * 1.01 * budget.clip_norm, batch_size if loss is mean else 1)
        noted.append(state(model))
    return noted


def _step(model: nn.Module, total: dict[str, Tensor], noise: Stream, std: float, divisor: float) -> None:
    named = dict(model.named_parameters())
    with torch.no_grad():
        for name in sorted(name for name, one in named.items() if one.requires_grad):
            noised = total[name] + std * torch.from_numpy(noise.normal(tuple(named[name].shape)))
            named[name] -= (noised / divisor).float()
