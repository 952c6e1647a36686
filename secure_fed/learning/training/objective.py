"""The interface between training and model: a pure function from trainable tensors and a batch to the examples' losses."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from secure_fed.errors import ConfigError, ModelError
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.tasks.task import Batch, Loss
from secure_fed.learning.training.checksums import changed, checksums
from secure_fed.tensors.tensors import Tensors


class Objective(nn.Module):
    """loss(tensors, batch) -> (B,), a pure function of the tensors given by name.

    Tensors of the model that `tensors` does not name keep the model's own values. float32 tensors are cast to the dtype that
    the model computes in, so gradients and optimiser states stay in float32.

    longest: the most tokens of a text, a public number: the length to which texts are cut, or the model's number of positions
    if that is smaller; None for no limit. public: examples that are nobody's secret, for trials of the model where no examples
    can be made up.
    """

    def __init__(self, model: nn.Module, loss: Loss, device: torch.device, *, longest: int | None = None) -> None:
        super().__init__()
        refuse_running_statistics(model)
        refuse_checkpointing(model)
        if isinstance(loss, nn.modules.loss._Loss):
            raise ConfigError(
                f"loss is {type(loss).__name__}, which takes predictions and targets; "
                "give a function loss(model, batch) that returns the loss of each example, shape (B,)"
            )
        self.model = model
        self.loss = loss
        self.device = device
        self.reading: AbstractContextManager[None] = nullcontext()  # a context for every call of the model
        self.longest = min((limit for limit in (longest, positions_of(model)) if limit is not None), default=None)
        self.public: Sequence[Any] = ()
        # The results of trials: right ways to compute per-example gradients (`packs`).
        self.ways: dict[Hashable, Any] = {}
        self.copies: list[Objective] = []  # with the same parameters, for passes that are computed at the same time
        self.beside: list[Objective] = []  # on other devices, for clients that are trained at the same time
        self._named = dict(model.named_parameters())
        self._checksums: dict[str, int] = {}
        # Layers that train are watched until a backward pass has shown that they are computed once (`_note_use`).
        self._inside, self._watched = False, False
        self._watching: list[RemovableHandle] = []
        self._used: dict[nn.Module, set[bool]] = {}  # whether with a gradient
        # Looked up once: walking a model of many modules costs more than a client's share of a round.
        self._buffers_at_start = [
            (module, name, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self.train()

    @property
    def reads_once(self) -> bool:
        """Whether the frozen encoder's output for each text is kept (`read_once`)."""
        return not isinstance(self.reading, nullcontext)

    def losses(self, tensors: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """(B,) losses of a batch already on the device, differentiable in `tensors`."""
        self._unwatch()
        watching = not self._watched and torch.is_grad_enabled()
        if watching:
            self._used = {self.model.get_submodule(name.rpartition(".")[0]): set[bool]() for name in tensors}
            self._watching = [layer.register_forward_pre_hook(self._note_use) for layer in self._used]
        named = {f"model.{name}": tensor.to(self._named[name].dtype) for name, tensor in tensors.items()}
        try:
            losses: Tensor = functional_call(self, named, (batch,))
            for layer, used in self._used.items() if watching else ():
                if used == {False}:
                    self._refuse(layer, "without a gradient")
        except BaseException:
            self._unwatch()  # nothing stays on the user's model after a run that fails here
            raise
        if watching and losses.requires_grad:
            losses.register_hook(self._note_backward)
        return losses

    def forward(self, batch: Batch) -> Tensor:
        self._inside = True
        try:
            with self.reading:
                return self.loss(self.model, batch)
        finally:
            self._inside = False

    def _note_backward(self, gradient: Tensor) -> None:
        self._watched = True

    def _unwatch(self) -> None:
        while self._watching:
            self._watching.pop().remove()

    def _note_use(self, layer: nn.Module, args: Any) -> None:
        """Checkpointing computes a layer without a gradient in the forward pass, or again in the backward pass."""
        if torch._C._current_graph_task_id() != -1:  # as torch.utils.checkpoint itself asks
            self._refuse(layer, "again in the backward pass")
        if self._inside:
            self._used[layer].add(torch.is_grad_enabled())

    def _refuse(self, layer: nn.Module, how: str) -> NoReturn:
        self._watched = False  # after this error a trial may choose another way to compute, which is watched too
        self._unwatch()
        raise ModelError(
            f"{type(layer).__name__}, a layer that trains, is computed {how}, as under torch.utils.checkpoint or "
            "torch.no_grad, so that its gradient would be wrong or missing; take that out of the model's code, and set "
            "training.microbatch to save memory"
        )

    def begin(self) -> None:
        """Prepare for the training of another client: training mode, and buffers reset."""
        self._unwatch()
        self.reset_buffers()
        if not self.model.training:
            self.train()

    def reset_buffers(self) -> None:
        """Undo changes of the model's buffers by forward passes, so that no client's training affects another's."""
        for module, name, start in self._buffers_at_start:
            module.get_buffer(name).copy_(start)

    @property
    def tolerance(self) -> float:
        """The relative difference of losses or gradients that rounding in the model's dtype explains."""
        return math.sqrt(max(torch.finfo(tensor.dtype).eps for tensor in self._named.values()))

    def changed_buffers(self) -> list[str]:
        """The names of the model's buffers that have changed: forward passes that keep statistics change some."""
        return [
            f"{type(module).__name__}.{name}"
            for module, name, start in self._buffers_at_start
            if not torch.equal(module.get_buffer(name), start)
        ]

    def note_parameters(self) -> None:
        """Note the checksums of the model's parameters, if they have not been noted. Runs without privacy do without."""
        self._checksums = self._checksums or checksums(self._named)

    def forget_parameters(self) -> None:
        """Forget the checksums: a user may change the model between runs."""
        for one in (self, *self.beside):
            one._checksums = {}

    def changed_parameters(self) -> list[str]:
        """The names of the model's parameters that have changed since they were noted, other than by `load`."""
        return changed(self._checksums, self._named) if self._checksums else []

    def load(self, tensors: Tensors) -> nn.Module:
        """Copy these tensors into the model, for evaluation or export, and return it."""
        self._unwatch()
        with torch.no_grad():
            for name in tensors:
                own, given = self._named[name], tensors.tensor(name)
                if own.shape == given.shape:
                    own.copy_(given)
                else:  # of a method whose tensors shrink
                    own.data = given.to(own)
        if self._checksums:
            self._checksums |= checksums({name: self._named[name] for name in tensors})
        self.reset_buffers()
        return self.model


def refuse_running_statistics(model: nn.Module) -> None:
    """Refuse layers with running statistics: they couple examples' losses, and training changes more than parameters."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and (
            module.track_running_stats or isinstance(module, nn.modules.batchnorm._BatchNorm)
        ):
            raise ModelError(
                f"layer {name} of the model is {type(module).__name__}, which couples the examples of a batch and keeps "
                "running statistics, which are neither sent to the server nor exported; give a model with GroupNorm or "
                "LayerNorm there"
            )


def refuse_checkpointing(model: nn.Module) -> None:
    """Refuse gradient checkpointing: the tensors of a pass are the model's for its forward part alone (`Objective.losses`).

    The layers that are computed again in the backward pass would read the model's own tensors, and give their gradients.
    """
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"gradient checkpointing is on in {name or type(model).__name__}, which computes layers again in the backward "
                "pass, where the trained tensors are no longer in place, so that gradients would be wrong; turn it off "
                "(model.gradient_checkpointing_disable(), or gradient_checkpointing in the model's config.json), and set "
                "training.microbatch to save memory"
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
