"""The memory of a pass, from shapes alone: the pass is computed on the meta device, whose tensors have sizes and no numbers.

Every operation of the forward and the backward pass runs as it would, allocates nothing, and tells the sizes of its results;
their sum over the tensors that live at one time is the memory that the pass would take, up to the scratch space within an
operation. Three things have no counterpart on this device, and are put in their place:

    fused attention          keeps its inputs, its output and one number a query; on this device it would keep all weights
    quantised layers         read their matrix in the type of their input, for as long as a product takes
    numbers that are asked   0 and True; the places of labelled tokens are as many as the examples have
"""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from secure_fed.learning.models.quantised import layers
from secure_fed.learning.tasks.next_tokens import rows_together, shaped_for
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.common_passes.packing import labelled
from secure_fed.learning.training.common_passes.passes import Pack, Places, found_in
from secure_fed.learning.training.local import losses
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.trials import embedding_rows


@dataclass(frozen=True)
class Footprint:
    """Bytes at the moment of a computation at which most live.

    scores: of tokens' scores. kept: inputs of layers that gradient checkpointing computes again. rest: activations, gradients.
    flops: the operations of the whole computation's products.
    """

    scores: int = 0
    kept: int = 0
    rest: int = 0
    flops: int = 0

    @property
    def peak(self) -> int:
        return self.scores + self.kept + self.rest


def of_pass(objective: Objective, places: Places, pack: Pack) -> Footprint:
    """Of a forward and a backward pass, as `found_in` computes it. places: of tensors on the meta device."""
    tensors = [places.moving, *places.shared.values(), *places.own.values()]
    with _on_meta(objective, pack.items, tensors) as (own, living):
        found_in(own, places, pack)
    return replace(living.most, flops=living.flops)


def of_evaluation(objective: Objective, items: Sequence[Any], collate: Collate) -> Footprint:
    """Of the losses of these items as one batch, without gradients."""
    training = objective.model.training
    objective.eval()
    try:
        with _on_meta(objective, items) as (own, living), torch.no_grad(), rows_together():
            losses(own, collate, items)
    finally:
        objective.train(training)
    return replace(living.most, flops=living.flops)


def weights(model: nn.Module) -> int:
    """The bytes of the model's parameters and buffers as they are stored, also of a model on the meta device."""
    stored = {id(layer.get_parameter("weight")): _stored(layer) for layer in layers(model).values()}
    return sum(stored.get(id(one), one.nbytes) for one in [*model.parameters(), *model.buffers()])


def _stored(layer: Any) -> int:
    """The bytes of a quantised matrix with its scales.

    8 bits: a float32 scale a row. 4 bits: a scale of 8 bits for 64 numbers, a float32 scale for 256 of these, and two tables.
    """
    numbers = int(layer.in_features * layer.out_features)
    if type(layer).__name__ != "Linear4bit":
        return numbers + 4 * int(layer.out_features)
    blocks = -(-numbers // 64)
    return -(-numbers // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256)


@contextmanager
def _on_meta(
    objective: Objective, items: Sequence[Any], tensors: Sequence[Tensor] = ()
) -> Iterator[tuple[Objective, _Living]]:
    """The objective on the meta device, and the memory of what is computed with it in the block."""
    own = copy.copy(objective)
    own.device = torch.device("meta")
    model: Any = objective.model
    for layer in layers(model).values():
        layer.forward = partial(_dequantised, layer)
    living = _Living(
        [*model.parameters(), *model.buffers(), *tensors], sum(map(labelled, items)), embedding_rows(model, "output")
    )
    again = [layer for layer in model.modules() if getattr(layer, "gradient_checkpointing", False)]
    hooks = [layer.register_forward_pre_hook(living.kept) for layer in again]
    try:
        with shaped_for(objective.device), living, _Fused():
            yield own, living
    finally:
        for hook in hooks:
            hook.remove()


class _Living(TorchDispatchMode):
    """Adds up the sizes of the tensors that live, and notes them at the moment of the largest sum.

    there: tensors that are counted elsewhere. labelled: the labelled tokens of the batch. words: of the vocabulary.
    """

    def __init__(self, there: Sequence[Tensor], labelled: int, words: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there, self._labelled, self._words = there, labelled, words
        self._sizes = {one.untyped_storage()._cdata: ("there", 0) for one in there}
        self._now = Counter[str]()
        self.most, self.flops = Footprint(), 0

    def kept(self, layer: nn.Module, args: tuple[Any, ...]) -> None:
        """A pre-hook of a layer that is computed again."""
        key = args[0].untyped_storage()._cdata if args and isinstance(args[0], Tensor) else 0
        kind, size = self._sizes.get(key, ("", 0))
        if kind == "rest":
            self._sizes[key] = "kept", size
            self._now.update(kept=size, rest=-size)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found: Any
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            found = torch.empty(self._labelled, args[0].ndim, dtype=torch.long, device="meta")
        else:
            found = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=found)
        for one in tree_leaves(found):
            if isinstance(one, Tensor) and one.is_meta:
                self._note(one)
        return found

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        kind = "scores" if self._words and tensor.ndim and tensor.shape[-1] == self._words else "rest"
        self._sizes[key] = kind, size
        self._now[kind] += size
        weakref.finalize(storage, self._gone, key)
        if self._now.total() > self.most.peak:
            self.most = Footprint(**self._now)

    def _gone(self, key: int) -> None:
        kind, size = self._sizes.pop(key)
        self._now[kind] -= size


class _Fused(TorchFunctionMode):
    """Attention that keeps no weights, as torch's kernels of processors and accelerators do."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention and args and args[0].is_meta:
            return _Attention.apply(*args[:3])  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, found, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return found

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, _, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _dequantised(layer: Any, x: Tensor) -> Tensor:
    """In place of a quantised layer's forward."""
    found: Tensor = _Product.apply(x, layer.out_features)  # type: ignore[no-untyped-call]
    return found if layer.bias is None else found + layer.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.shape, ctx.rows = x.shape, rows
        matrix = x.new_empty(rows, x.shape[-1])
        return functional.linear(x, matrix)

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, None]:
        matrix = along.new_empty(ctx.rows, ctx.shape[-1])
        return along @ matrix, None
