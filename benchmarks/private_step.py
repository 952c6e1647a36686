"""The cost of a private local step compared with a plain step and with Opacus's.

    HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 python benchmarks/private_step.py [--repeats 15]

A model of the shape of MiniLM-L6 with random weights, LoRA of rank 8 on query and value and a classifier, batches of 16, one
thread. Texts of 64 tokens, and texts of 8 to 64. All ways alternate on the same batches. Prints medians over the turns: of
milliseconds, and of the ratio to the plain step of the same turn. The trial of the model comes before the first turn.

    plain      forward, backward, AdamW
    opacus     Opacus's hooks (GradSampleModule) and its optimizer, which clips and adds noise
    ours       `train_together` for one client: secret coins, per-example gradients, clipping, noise, AdamW (sampling at rate 1)
    singly     the same, one example at a time: for a model whose examples cannot share passes
    vmap       per-example gradients alone, by torch.func.vmap on the same functions, given a ready 4-D mask

The plain step and Opacus's get a collated batch; ours collates it.
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from timing import Limit, at_most, machine, ratio, show, timed, turns
from torch import Tensor, nn

from privacy.entropy import SystemEntropy
from privacy.mechanisms import Gaussian
from secure_fed.config import TrainingConfig
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.lora import LoraAdapter
from secure_fed.learning.models.adapters.parameters import read
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes.passes import Trial
from secure_fed.learning.training.common_passes.trainings import Ways, train_together
from secure_fed.learning.training.local import Job, PrivateSteps
from secure_fed.learning.training.objective import Objective
from secure_fed.tensors.tensors import Tensors

BATCH, LENGTH, LABELS = 16, 64, 4
SHAPE = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
LR, NOISE, CLIP = 1e-3, 1.0, 1.0
CPU = torch.device("cpu")

Step = Callable[[], None]


def adapted() -> tuple[nn.Module, list[str]]:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(num_labels=LABELS, **SHAPE))
    LoraAdapter(rank=8).inject(model, ["classifier.weight", "classifier.bias"], 0)
    return model, [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def texts(shortest: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    lengths = np.linspace(shortest, LENGTH, BATCH).astype(int)
    return [{"input_ids": rng.integers(1000, 20_000, n), "labels": i % LABELS} for i, n in enumerate(lengths)]


def plain(items: Sequence[Any], collate: Collate) -> Step:
    model, names = adapted()
    objective, batch = Objective(model, classification.loss, CPU), collate(items)
    moving = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in names}
    optimizer = torch.optim.AdamW(moving.values(), LR)

    def step() -> None:
        optimizer.zero_grad()
        with objective.holding(moving):
            objective.losses(batch).mean().backward()
        optimizer.step()

    return step


def opacus(items: Sequence[Any], collate: Collate) -> Step:
    model, names = adapted()
    take, batch = opacus_step(model, names, BATCH), collate(items)
    return lambda: take(batch)


def opacus_step(model: nn.Module, names: Sequence[str], expected: int) -> Callable[[Any], None]:
    """A step on a batch, with Opacus's hooks and optimizer. expected: the number of examples in a batch."""
    from opacus.grad_sample import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model.train(), strict=False, loss_reduction="mean")
    optimizer = DPOptimizer(
        torch.optim.AdamW([model.get_parameter(name) for name in names], LR),
        noise_multiplier=NOISE,
        max_grad_norm=CLIP,
        expected_batch_size=expected,
        loss_reduction="mean",
    )

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        classification.loss(wrapped, batch).mean().backward()
        optimizer.step()

    return step


def ours(items: Sequence[Any], collate: Collate, *, shared: bool = True) -> Step:
    """One private step, including its set-up, which a client needs once in a round."""
    model, names = adapted()
    objective, entropy = Objective(model, classification.loss, CPU, longest=LENGTH), SystemEntropy()
    settings = TrainingConfig(batch_size=BATCH)
    before: Tensors = read(model, names)
    job = Job(before, names, items, collate, settings, LR, np.random.default_rng(0))

    def private() -> Job:
        return replace(job, private=PrivateSteps(Gaussian(NOISE), CLIP, 1, entropy.stream("step")))

    ways = Ways() if shared else Ways({private().kind: Trial("to see what it costs")})
    return lambda: train_together(objective, [private()], ways) and None


def vmap(items: Sequence[Any], collate: Collate) -> Step:
    model, names = adapted()
    objective, batch = Objective(model, classification.loss, CPU), collate(items)
    moving = {name: model.get_parameter(name).detach() for name in names}
    shown = batch["attention_mask"].bool()[:, None, None, :].expand(BATCH, 1, LENGTH, LENGTH)
    batch["attention_mask"] = torch.where(shown, 0.0, torch.finfo(torch.float32).min)

    def loss(tensors: dict[str, Tensor], example: dict[str, Tensor]) -> Tensor:
        with objective.holding(tensors):
            return objective.losses({name: value.unsqueeze(0) for name, value in example.items()})[0]

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0), randomness="different")
    return lambda: each(moving, batch) and None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    print(machine("torch", "transformers", "peft", "opacus") + "; one thread")
    collate, limits = Collate(0), list[Limit]()
    for shortest in (LENGTH, 8):
        items = texts(shortest)
        steps = {
            "plain": plain(items, collate),
            "opacus": opacus(items, collate),
            "ours": ours(items, collate),
            "singly": ours(items, collate, shared=False),
            "vmap": vmap(items, collate),
        }
        about = f"texts of {shortest} to {LENGTH} tokens" if shortest < LENGTH else f"texts of {LENGTH} tokens"
        print(about)
        found = turns({name: timed(step) for name, step in steps.items()}, repeats, warm=2)
        for name, seconds in found.items():
            print(f"    {name:8}{1e3 * statistics.median(seconds):8.1f} ms{ratio(seconds, found['plain']):8.2f}")
        limits.append(at_most(f"ours over Opacus's hooks, {about}", ratio(found["ours"], found["opacus"]), 1.0))
    show(limits)


if __name__ == "__main__":
    main()
