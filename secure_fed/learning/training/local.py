"""Local optimisation, standing on one seam: a pure function from trainable tensors and a batch to per-example losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from secure_fed.config import TrainingConfig
from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.data.encode import Batch as BatchOfItems
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.tasks.task import Batch, Collate, Loss
from secure_fed.learning.training.private_steps import PrivateSteps
from secure_fed.learning.training.schedule import local_batches, optimizer_of, planned_steps, stepped
from secure_fed.tensors.tensors import Layout, Tensors


class Objective(nn.Module):
    """loss(tensors, batch) -> (B,), a pure function of the tensors given by name.

    Tensors the model has and `tensors` does not name keep the model's own values. What is given in float32 is cast to the
    dtype the model computes in, so gradients and optimiser states stay in float32.

    longest: the most tokens of a text: what texts are cut to, or fewer where the model has no more positions; None is no limit.
    It is public.
    """

    def __init__(self, model: nn.Module, loss: Loss, device: torch.device, *, longest: int | None = None) -> None:
        super().__init__()
        refuse_running_statistics(model)
        if isinstance(loss, nn.modules.loss._Loss):
            raise ConfigError(
                f"loss is {type(loss).__name__}, which takes predictions and targets; "
                "give a function loss(model, batch) that returns the loss of each example, shape (B,)"
            )
        self.model = model
        self.loss = loss
        self.device = device
        self.reads_once = False  # whether the model keeps what its frozen encoder made of a text (`read_once`)
        self.longest = min((limit for limit in (longest, positions_of(model)) if limit is not None), default=None)
        # Which ways of taking per-example gradients have proven right (`packs`).
        self.ways: dict[Hashable, Any] = {}
        self.copies: list[Objective] = []  # with the same parameters, for passes that are computed at the same time
        self.beside: list[Objective] = []  # on other devices, for clients that are trained at the same time
        self._named = dict(model.named_parameters())
        # Looked up once: walking a model of many modules costs more than a client's share of a round.
        self._buffers_at_start = [
            (module, name, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self.train()

    def losses(self, tensors: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B,) losses of a batch already on the device, differentiable in `tensors`."""
        named = {f"model.{name}": tensor.to(self._named[name].dtype) for name, tensor in tensors.items()}
        losses: Tensor = functional_call(self, named, (batch,))
        return losses

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch)

    def begin(self) -> None:
        """Make ready for the training of another client: in training mode, and the buffers as they were."""
        self.reset_buffers()
        if not self.model.training:
            self.train()

    def reset_buffers(self) -> None:
        """Undo whatever forward passes did to the model's buffers, so that no client's training reaches another's."""
        for module, name, start in self._buffers_at_start:
            module.get_buffer(name).copy_(start)

    @property
    def tolerance(self) -> float:
        """The relative difference, of losses or gradients, that the rounding of what the model computes in accounts for."""
        return math.sqrt(max(torch.finfo(tensor.dtype).eps for tensor in self._named.values()))

    def changed_buffers(self) -> list[str]:
        """The names of the model's buffers that are not as they were: a model whose forward passes keep statistics has some."""
        return [
            f"{type(module).__name__}.{name}"
            for module, name, start in self._buffers_at_start
            if not torch.equal(module.get_buffer(name), start)
        ]

    def load(self, tensors: Tensors) -> nn.Module:
        """Copy these tensors into the model, for evaluation or export, and return it."""
        with torch.no_grad():
            for name in tensors:
                own, given = self._named[name], tensors.tensor(name)
                if own.shape == given.shape:
                    own.copy_(given)
                else:  # of a method whose tensors shrink
                    own.data = given.to(own)
        self.reset_buffers()
        return self.model


def refuse_running_statistics(model: nn.Module) -> None:
    """An example's loss is its own affair, and training moves parameters alone; a layer with running statistics breaks both."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm)
        ):
            raise ModelError(
                f"layer {name} of the model is {type(module).__name__}, which couples the examples of a batch and keeps "
                "statistics that neither travel nor are saved; give a model with GroupNorm or LayerNorm there"
            )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor in its dicts, lists and tuples on the device."""
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch


@dataclass(frozen=True)
class Trained:
    """The result of local training: the trained tensors, and the mean loss over the examples seen (NaN if withheld)."""

    after: Tensors
    loss: float


@dataclass(frozen=True)
class Placed:
    """The tensors that local training starts from, on its device: `moving` are the optimised leaves, `held` the rest.

    start: what `moving` was before the first step.
    """

    start: Mapping[str, Tensor]
    moving: dict[str, Tensor]
    held: dict[str, Tensor]

    @classmethod
    def of(cls, before: Tensors, trainable: Sequence[str], device: torch.device) -> Placed:
        start = {name: before.tensor(name).to(device).contiguous() for name in before}
        moving = {name: start[name].detach().clone().requires_grad_() for name in trainable}
        held = {name: tensor for name, tensor in start.items() if name not in moving}
        return cls({name: start[name] for name in moving}, moving, held)

    @property
    def shapes(self) -> Hashable:
        """Of the tensors that move, by name."""
        return tuple((name, tensor.shape) for name, tensor in self.moving.items())

    def trained(self, loss: float) -> Trained:
        return Trained(Tensors((name, tensor.detach().cpu()) for name, tensor in self.moving.items()), loss)


@dataclass(frozen=True)
class Job:
    """One local training: the tensors it starts from, which of them move, the examples, the optimiser, and the random numbers.

    before: every tensor by which the objective differs from its model. trainable: the names in it that are optimised. last: the
    names of the head's last layer, whose learning rate is another one (`TrainingConfig.head_times`).
    settings: the optimiser, the batch size and the number of steps. lr: the learning rate of this round. rng: the order of
    examples, and dropout. private: what makes its steps private; rng, which also says which examples of a group count, is then
    as secret as the coins, since what it draws for one unit depends on how many units came before.
    """

    before: Tensors
    trainable: Sequence[str]
    examples: Sequence[Any]
    collate: Collate
    settings: TrainingConfig
    lr: float
    rng: np.random.Generator
    private: PrivateSteps | None = None
    last: tuple[str, ...] = ()

    @property
    def scoring(self) -> list[str]:
        """The names of the head's last layer among those that train."""
        return [name for name in self.trainable if name in self.last]

    @property
    def kind(self) -> Hashable:
        """Equal for jobs that can be stacked: names and shapes of their tensors, which train, at which rate, and how."""
        return tuple(self.trainable), Layout.of(self.before).entries, self.private is not None, tuple(self.scoring)

    @property
    def steps(self) -> int:
        """How many steps it makes; none without examples."""
        if self.private is None or not len(self.examples):
            return planned_steps(len(self.examples), self.settings)
        return self.private.count

    def placed(self, device: torch.device) -> Placed:
        """The tensors on the device, ready to be optimised."""
        return Placed.of(self.before, self.trainable, device)

    def batches(self, collate: Collate | None = None) -> Iterator[BatchOfItems]:
        """The mini-batches of all steps in their order, drawn from `rng`; collated by `collate`, or else as the job says."""
        return local_batches(self.examples, collate or self.collate, self.settings, self.rng)


def train(objective: Objective, job: Job) -> Trained:
    """Minimise the mean loss over the job's examples, moving its trainable tensors and nothing else.

    With FedProx the local objective is F(w) + mu/2 ||w - w_before||^2. The result depends on the arguments alone: the
    order of examples and the model's dropout both come from `job.rng`.
    """
    placed = job.placed(objective.device)
    optimizer = optimizer_of(placed.moving.values(), job.settings, job.lr)
    last = [placed.moving[name] for name in job.scoring]
    losses: list[Tensor] = []
    objective.begin()
    with seeded(objective.device, job.rng):
        for batch in job.batches(list):
            optimizer.zero_grad()
            for items in parted(batch.inputs, job.settings.microbatch):
                loss = objective.losses(placed.held | placed.moving, to_device(job.collate(items), objective.device))
                require_one_each(loss, len(items))
                losses.append(loss.detach())
                (loss.sum() / len(batch.inputs)).backward()
            if job.settings.proximal:
                proximity(placed, job.settings.proximal).backward()
            bound_gradients([tensor.grad for tensor in placed.moving.values()], job.settings.max_grad_norm)
            stepped(optimizer, last, job.settings.head_times)
    mean_loss = float(torch.cat(losses).mean()) if losses else math.nan
    return placed.trained(mean_loss)


Train = Callable[[Objective, Job], Trained]  # `train`, or what stands in its place


def require_one_each(losses: Tensor, examples: int) -> None:
    """Refuse a loss that is not one number an example."""
    if losses.shape != (examples,):
        raise ConfigError(
            f"the loss must give one number for each of the {examples} examples of a batch, shape ({examples},), and gave "
            f"shape {tuple(losses.shape)}; a loss of torch's does with reduction='none'"
        )


def parted(items: list[Any], most: int | None) -> list[list[Any]]:
    """The items in parts of at most so many."""
    return [items[start : start + most] for start in range(0, len(items), most)] if most else [items]


def bound_gradients(gradients: Sequence[Tensor | None], most: float | None) -> None:
    """Cut the gradient of a step, all tensors together, to that norm, in place; None cuts nothing."""
    there = [gradient for gradient in gradients if gradient is not None]
    if most is None or not there:
        return
    norm = torch.stack([gradient.norm() for gradient in there]).norm()
    for gradient in there:
        gradient.mul_((most / norm.clamp_min(most)).to(gradient))


def proximity(placed: Placed, mu: float) -> Tensor:
    """FedProx's mu/2 ||w - w_before||^2."""
    moves = [(tensor - placed.start[name]).square().sum() for name, tensor in placed.moving.items()]
    return mu / 2 * torch.stack(moves).sum()


@contextmanager
def seeded(device: torch.device, rng: np.random.Generator) -> Iterator[None]:
    """Dropout that depends on `rng` alone, and torch's global generator left as it was."""
    seed = int(rng.integers(2**63))
    kind = device.type if device.type in ("cuda", "mps") else None
    with torch.random.fork_rng([device] if kind else [], device_type=kind or "cuda"):
        torch.default_generator.manual_seed(seed)
        if kind == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        elif kind == "mps":
            torch.mps.manual_seed(seed)
        yield
