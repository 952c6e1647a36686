"""Your own model, data and loss: three laboratories fit one small network, and each keeps its data.

    python examples/own_model.py

Any model with linear layers works. Here the last layer trains in full beside the adapters (`method.modules_to_save`), and a
callback prints progress.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from secure_fed import Federation, RunConfig, heartbeat

FEATURES, CLASSES = 20, 4


def laboratory(examples: int, truth: Tensor, generator: torch.Generator) -> Dataset[tuple[Tensor, ...]]:
    measured = torch.randn(examples, FEATURES, generator=generator)
    return TensorDataset(measured, (measured @ truth).argmax(1))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """(B,) losses, one for each example, so that no example's loss depends on another."""
    measured, label = batch
    return nn.functional.cross_entropy(model(measured), label, reduction="none")


def metrics(model: nn.Module, batches: object) -> dict[str, float]:
    right = [(model(measured).argmax(1) == label).float() for measured, label in batches]  # type: ignore[attr-defined]
    return {"accuracy": float(torch.cat(right).mean())}


class Watch:
    """Prints the first and every fifth round. `Federation` lists the methods that a callback may have."""

    def on_round_end(self, record: dict[str, object], state: object) -> None:
        if record["round"] in (1, 5, 10, 15, 20):
            print(f"round {record['round']:>2}: accuracy {record['accuracy']:.3f}")


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(FEATURES, CLASSES, generator=generator)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, CLASSES))
    settings = [
        "method.name=fra_lora",
        "method.rank=4",
        'method.target_modules=["0", "2"]',
        'method.modules_to_save=["4"]',
        "training.lr=0.01",
        "federation.rounds=20",
    ]
    federation = Federation(
        RunConfig.load(overrides=settings),
        model=model,
        train=[laboratory(size, truth, generator) for size in (300, 200, 100)],
        test=laboratory(500, truth, generator),
        loss=loss,
        metrics=metrics,
        callbacks=[Watch()],
    )
    result = federation.run()
    print(f"{result.summary['trainable']} of {sum(p.numel() for p in model.parameters())} parameters trained")


if __name__ == "__main__":
    with heartbeat():  # says on a terminal what it is doing
        main()
