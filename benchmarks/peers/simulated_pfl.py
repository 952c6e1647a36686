"""The whole run by pfl's simulation, a process for every core.   python simulated_pfl.py FOLDER

As its guide to fast simulations recommends: data in memory, no evaluation on users, central evaluation divided among the
processes, which find each other by `PFL_WORKER_ADDRESSES` and `PFL_WORKER_RANK`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import Clock, Example, Work, padded, shuffled, trainable
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.callback.central_evaluation import CentralEvaluationCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.internal.ops import get_ops
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Examples(Dataset):
    """A user's token ids in memory, shuffled and padded on access; the test set in its order."""

    def __init__(self, examples: list[Example], rng: np.random.Generator | None, user_id: str | None = None) -> None:
        super().__init__((np.array([label for _, label in examples]),), user_id=user_id)
        self.examples, self.rng = examples, rng

    def iter(self, batch_size: int | None) -> Iterator[dict[str, Tensor]]:
        size = batch_size or len(self.examples)
        if self.rng is not None:
            yield from shuffled(self.examples, size, self.rng)
            return
        for start in range(0, len(self.examples), size):
            yield padded(self.examples[start : start + size])

    def get_worker_partition(self) -> Examples:
        workers = get_ops().distributed
        return Examples(self.examples[workers.global_rank :: workers.world_size], self.rng)


class Classifier(nn.Module):
    """A model with pfl's interface: a loss and metrics."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def loss(self, **batch: Tensor) -> Tensor:
        self.model.train()
        loss: Tensor = self.model(**batch).loss
        return loss

    @torch.no_grad()
    def metrics(self, labels: Tensor, **inputs: Tensor) -> dict[str, Any]:
        self.model.eval()
        right = int((self.model(**inputs).logits.argmax(-1) == labels).sum())
        return {"accuracy": Weighted(right, len(labels))}


class Ticks(TrainingProcessCallback):
    """A callback after the evaluation, whose figure it reads. pfl evaluates before the first round and not after it."""

    def __init__(self, evaluation: CentralEvaluationCallback, clock: Clock) -> None:
        self.evaluation, self.clock = evaluation, clock

    def on_train_begin(self, *, model: Any) -> Metrics:
        self.evaluation.on_train_begin(model=model)
        self.clock.tick()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        stop, found = self.evaluation.after_central_iteration(
            aggregate_metrics, model, central_iteration=central_iteration
        )
        figures = found.to_simple_dict()
        self.clock.tick(figures.get("Central val | accuracy"))
        return stop, found


class OnlyTraining(FederatedAveraging):
    """Federated averaging without evaluation on the first round's users, which no frequency setting turns off."""

    def get_next_central_contexts(self, *given: Any) -> Any:
        contexts, model, metrics = super().get_next_central_contexts(*given)
        if contexts is not None:
            contexts = tuple(dataclasses.replace(one, do_evaluation=False) for one in contexts)
        return contexts, model, metrics


def run(work: Work) -> None:
    clock, settings = Clock(), work.settings
    np.random.seed(0)  # the same on every process, as pfl requires
    rank = get_ops().distributed.global_rank
    rng = np.random.default_rng(rank)
    model = Classifier(work.adapted())
    moving = trainable(model)
    wrapped = PyTorchModel(
        model,
        local_optimizer_create=lambda parameters, lr: torch.optim.AdamW(moving.values(), lr=lr, weight_decay=0.0),
        central_optimizer=torch.optim.SGD(moving.values(), lr=1.0),
    )
    users = {str(client): Examples(own, rng, str(client)) for client, own in enumerate(work.clients)}
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    ordered = sorted(work.test, key=lambda example: len(example[0]))
    evaluated = CentralEvaluationCallback(Examples(ordered, None), NNEvalHyperParams(local_batch_size=64))
    OnlyTraining().run(
        NNAlgorithmParams(
            central_num_iterations=settings["rounds"],
            evaluation_frequency=settings["rounds"] + 1,
            train_cohort_size=settings["cohort"],
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        wrapped,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=settings["lr"], local_batch_size=settings["batch"]),
        NNEvalHyperParams(local_batch_size=64),
        callbacks=[Ticks(evaluated, clock)],
        send_metrics_to_platform=False,
    )
    if rank == 0:
        clock.report(work, sum(tensor.numel() for tensor in moving.values()))


if __name__ == "__main__":
    run(Work.read(sys.argv[1]))
