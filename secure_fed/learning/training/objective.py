"""The interface between training and model: the losses of examples, at tensors that take the place of parameters.

Checksums of parameters show whether a forward or backward pass has changed one. Some layers write to their parameters as they
run: an embedding with `max_norm` shortens the rows of a batch's tokens, others keep a mean of their inputs in a frozen
parameter. No noise covers such a change. torch counts the changes of a tensor, but not those by way of `.data`, and a copy of
all parameters would double a model's memory. A checksum costs one reading.
"""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.errors import ConfigError, ModelError, SecureFedError
from secure_fed.learning.models.architecture import positions_of
from secure_fed.learning.models.devices import Values, is_divided
from secure_fed.learning.models.dropout_and_checkpointing import is_checkpointing, set_checkpointing
from secure_fed.learning.models.quantised import scales
from secure_fed.learning.tasks.task import Batch, Collate, Loss
from secure_fed.learning.training.trial_results import Kept, surroundings
from secure_fed.tensors.tensors import Tensors

CANNOT = (SecureFedError, RuntimeError, ValueError, TypeError, LookupError)
"""What a model raises that cannot compute a pass."""
_WHOLE = {1: torch.uint8, 2: torch.int16}
_PART, _ELSEWHERE = 2**16, 2**22  # numbers of a checksum at once: on a CPU, more leave its cache


class Objective(nn.Module):
    """The losses of a model's examples, as a function of tensors that take the place of its parameters.

        with objective.holding(tensors):
            objective.losses(batch).sum().backward()

    Forward and backward pass belong into one block: layers that are computed again in the backward pass (gradient
    checkpointing), hooks and offloading then read the same tensors in both. Parameters that `tensors` does not name keep the
    model's own values. float32 tensors are cast to the dtype that the model computes in, so gradients and optimiser states
    stay in float32.

    longest: the most tokens of a text, a public number: the length to which texts are cut, or the model's number of positions
    if that is smaller; None for no limit. public: examples that are nobody's secret, for trials of the model where no examples
    can be made up.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        device: torch.device,
        *,
        longest: int | None = None,
        checkpointing: bool | None = None,
    ) -> None:
        """checkpointing: whether layers are computed again in the backward pass; None: as the model is set."""
        super().__init__()
        refuse_running_statistics(model)
        if isinstance(loss, nn.modules.loss._Loss):
            raise ConfigError(
                f"loss is {type(loss).__name__}, which takes predictions and targets; "
                "give a function loss(model, batch) that returns the loss of each example, shape (B,)"
            ).about("loss", loss, "a function of model and batch")
        set_checkpointing(model, is_checkpointing(model) if checkpointing is None else checkpointing)
        self.model = model
        self.loss = loss
        self.device = device
        self.divided = is_divided(model)  # then no copy of the model is made
        self.reading: AbstractContextManager[None] = nullcontext()  # a context for every call of the model
        self.longest = min((limit for limit in (longest, positions_of(model)) if limit is not None), default=None)
        self.public: Sequence[Any] = ()
        self.kept = Kept()  # the results of trials
        self.copies: list[Objective] = []  # with the same parameters, for passes that are computed at the same time
        self.beside: list[Objective] = []  # on other devices, for clients that are trained at the same time
        self._named = dict(model.named_parameters())
        self._checksums: dict[str, int] = {}
        # Whether a backward pass has shown that the layers that train are computed with a gradient.
        self._watched = False
        # Looked up once: walking a model of many modules costs more than a client's share of a round.
        owners: dict[int, list[tuple[nn.Module, str]]] = {}  # the places of each parameter; tied ones have several
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    owners.setdefault(id(parameter), []).append((module, name))
        self._places = {name: owners[id(parameter)] for name, parameter in self._named.items()}
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

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, these tensors are the model's parameters of their names.

        ModelError, after the first block with gradients, for a layer of theirs that ran, and only without a gradient.
        """
        places = [(module, own, name) for name in tensors for module, own in self._places[name]]
        watching = not self._watched and torch.is_grad_enabled()
        with _watched({module for module, _, _ in places}) if watching else nullcontext():
            cast = {
                name: tensor.to(self._named[name].device, self._named[name].dtype) for name, tensor in tensors.items()
            }
            try:
                for module, own, name in places:
                    module._parameters[own] = cast[name]  # type: ignore[assignment]  # not a leaf of the model
                yield
            finally:
                for module, own, name in places:
                    module._parameters[own] = self._named[name]
        self._watched |= watching

    def losses(self, batch: Batch) -> Tensor:
        """(B,) losses of a batch already on the device; one number an example, or ConfigError."""
        with self.reading:
            found: Tensor = self.loss(self.model, batch)
        return found

    def begin(self) -> None:
        """Prepare for the training of another client: training mode, and buffers reset."""
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
        types = {tensor.dtype for tensor in self._named.values() if tensor.is_floating_point()}
        return math.sqrt(max(torch.finfo(dtype).eps for dtype in types))

    def changed_buffers(self) -> list[str]:
        """The names of the model's buffers that have changed: forward passes that keep statistics change some."""
        return [
            f"{type(module).__name__}.{name}"
            for module, name, start in self._buffers_at_start
            if not torch.equal(module.get_buffer(name), start)
        ]

    def note_parameters(self) -> None:
        """Note the checksums of the model's parameters, if they have not been noted. Runs without privacy do without."""
        self._checksums = self._checksums or checksums(self._values())

    def forget_parameters(self) -> None:
        """Forget the checksums: a user may change the model between runs."""
        for one in (self, *self.beside):
            one._checksums = {}

    def changed_parameters(self) -> list[str]:
        """The names of the model's parameters that have changed since they were noted, other than by `load`."""
        return changed(self._checksums, self._values()) if self._checksums else []

    def _values(self) -> Mapping[str, Tensor]:
        return ChainMap(scales(self.model), Values(self.model, self._named))  # type: ignore[arg-type]  # which is only read

    def surroundings(self, collate: Collate, replaced: Collection[str]) -> dict[str, str] | None:
        """Everything that could change a bit of a pass (`trial_results`); None if results are kept in memory alone.

        That is so where they could depend on examples of the data, because none are made up. replaced: the names of parameters
        with other tensors in their place.
        """
        if not self.kept.files or not hasattr(collate, "padded_to"):
            return None
        self.note_parameters()
        weights = {name: found for name, found in self._checksums.items() if name not in replaced}
        return surroundings(self.model, (self.loss, collate, self.longest, self.reads_once), weights, self.device)

    def load(self, tensors: Tensors) -> nn.Module:
        """Copy these tensors into the model, for evaluation or export, and return it."""
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


@contextmanager
def _watched(layers: Collection[nn.Module]) -> Iterator[None]:
    """ModelError after the block for a layer that was computed in it, and each time without a gradient."""
    used: dict[nn.Module, set[bool]] = {}

    def note(layer: nn.Module, args: Any) -> None:
        used.setdefault(layer, set()).add(torch.is_grad_enabled())

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    if layer := next((layer for layer, modes in used.items() if modes == {False}), None):
        raise ModelError(
            f"{type(layer).__name__}, a layer that trains, is computed without a gradient, as under torch.no_grad or a "
            "reentrant torch.utils.checkpoint whose inputs require none: take that out of the model's code, or call checkpoint "
            "with use_reentrant=False"
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


def checksums(named: Mapping[str, Tensor]) -> dict[str, int]:
    """By name, sum_i r_i b_i mod 2^64 over a tensor's bits b_i, taken as whole numbers, with fixed random weights r_i.

    Changes of values, signs, scale and order change the sum, up to coincidences of one in billions.
    """
    found = {name: _weighted(tensor.detach()) for name, tensor in named.items()}
    places = {one.device for one in found.values()}
    read = {  # a GPU is waited for once
        place: iter(torch.stack([one for one in found.values() if one.device == place]).tolist()) for place in places
    }
    return {name: next(read[one.device]) for name, one in found.items()}


def changed(before: Mapping[str, int], named: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that differ from their checksums, or have none."""
    return [name for name, found in checksums(named).items() if before.get(name) != found]


def row_checksums(tensor: Tensor) -> list[int]:
    """The same sum for each row of a tensor (B, ...)."""
    bits = tensor.contiguous().flatten(1).view(_WHOLE.get(tensor.element_size(), torch.int32))  # (B, n)
    weights, n = _weights(tensor.device), bits.shape[1]
    sums = [(part * weights[: part.shape[1]]).sum(1) for part in bits.split(len(weights), 1)] if n else []
    turned = [one * weights[at % len(weights)] for at, one in enumerate(sums)] if len(sums) > 1 else sums
    found: list[int] = torch.stack(turned).sum(0).tolist() if turned else [0] * len(tensor)
    return found


def _weighted(tensor: Tensor) -> Tensor:
    """() int64. The bits are read by 32, so that no weight's product loses the highest ones, and a part at a time."""
    kind = _WHOLE.get(tensor.element_size(), torch.int32)
    bits, weights = tensor.contiguous().reshape(-1).view(kind), _weights(tensor.device)
    sums = [(part * weights[: len(part)]).sum() for part in bits.split(len(weights))]
    return sums[0] if len(sums) == 1 else (torch.stack(sums) * weights[: len(sums)]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    count = _PART if device.type == "cpu" else _ELSEWHERE
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count,), generator=torch.Generator().manual_seed(0)).to(device)
