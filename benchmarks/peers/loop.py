"""The whole run as a plain loop over Transformers and PEFT, and with noise over Opacus.   python loop.py FOLDER

With noise each client trains by DP-SGD: Poisson batches, Opacus's hooks, and its optimizer, which clips and adds noise.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable

import numpy as np
import torch
from common import Clock, Work, accuracy, padded, train, trainable
from torch import nn

LocalTraining = Callable[[int, np.random.Generator], None]


def privately(model: nn.Module, work: Work) -> LocalTraining:
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer
    from opacus.utils.uniform_sampler import UniformWithReplacementSampler

    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    settings = work.settings
    wrapped = GradSampleModule(model.train(), strict=False, loss_reduction="mean")

    def local(client: int, rng: np.random.Generator) -> None:
        model.train()
        examples = work.clients[client]
        steps = -(-len(examples) // settings["batch"])
        drawn = UniformWithReplacementSampler(
            num_samples=len(examples), sample_rate=settings["batch"] / len(examples), steps=steps
        )
        optimizer = DPOptimizer(
            work.optimizer(model),
            noise_multiplier=settings["noise"],
            max_grad_norm=settings["clip"],
            expected_batch_size=settings["batch"],
            loss_reduction="mean",
        )
        for indices in drawn:
            optimizer.zero_grad()
            wrapped(**padded([examples[i] for i in indices])).loss.backward()
            optimizer.step()

    return local


def run(work: Work) -> None:
    clock, settings, rng = Clock(), work.settings, np.random.default_rng(0)
    model = work.adapted()
    moving = trainable(model)
    local: LocalTraining = (
        privately(model, work) if settings["noise"] else lambda client, rng: train(model, work, client, rng)
    )
    clock.tick()
    for _ in range(settings["rounds"]):
        before = {name: tensor.detach().clone() for name, tensor in moving.items()}
        total = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
        for client in rng.choice(len(work.clients), settings["cohort"], replace=False):
            for name, tensor in moving.items():
                tensor.data.copy_(before[name])
            local(int(client), rng)
            for name, tensor in moving.items():
                total[name] += tensor.detach()
        for name, tensor in moving.items():
            tensor.data.copy_(total[name] / settings["cohort"])
        clock.tick(accuracy(model, work.test))
    clock.report(work, sum(tensor.numel() for tensor in moving.values()))


if __name__ == "__main__":
    run(Work.read(sys.argv[1]))
