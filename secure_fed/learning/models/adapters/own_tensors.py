"""Parameters with a separate value for every example of a batch; the model itself needs no change.

The examples of one batch can belong to many clients: the frozen layers run on all of them at once, and an adapted layer
multiplies each example by its own client's tensors. `EachOwn.of(rows)`, rows (B, *shape), replaces a parameter of this shape.
The operations that adapters and heads use have a rule; with x (B, ..., n), W (B, m, n), b and w (B, n) or (B, m),

    linear        y_i = x_i W_i^T + b_i     (`addmm` too: the layers of GPT-2, whose W is transposed)
    layer norm    y_i = norm(x_i) w_i + b_i
    embedding     y_i = W_i[ids_i]

and everything else raises `NoRuleError`; a module of this project can read the values (`rows_of`). If a model has several rows
for each example, one after the other (the choices of a question), each of them has its example's value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from secure_fed.errors import ModelError
from secure_fed.learning.models.products import product


class NoRuleError(ModelError):
    """An operation that cannot give every example its own value."""


class EachOwn(Tensor):
    """A parameter with a value for each example. It has the shape, dtype and device of one value, and no numbers itself."""

    rows: Tensor  # (B, *shape)

    @staticmethod
    def of(rows: Tensor) -> EachOwn:
        made = rows.detach().new_empty(()).expand(rows.shape[1:]).as_subclass(EachOwn)
        made.rows = rows
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if rule := _RULES.get(func):
            return rule(*args, **(kwargs or {}))
        if func in _ABOUT or getattr(func, "__self__", None) in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NoRuleError(
            f"{getattr(func, '__name__', func)} has no rule for tensors of which each example has its own"
        )


def rows_of(parameter: Tensor) -> Tensor:
    """(B, *shape), each example's own value; (1, *shape) for a parameter that all examples share."""
    return parameter.rows if isinstance(parameter, EachOwn) else parameter.unsqueeze(0)


def of_each(x: Tensor, examples: int) -> Tensor:
    """(B k, ...) as (B, k, ...), for B examples."""
    if not x.ndim or not examples or len(x) % examples:
        raise NoRuleError(
            f"a layer is given {tuple(x.shape)} in a batch of {examples} examples: not each has its part of that"
        )
    return x.reshape(examples, len(x) // examples, *x.shape[1:])


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not isinstance(weight, EachOwn):
        return _added(product(x, weight), bias)
    rows = weight.rows
    tokens = of_each(x, len(rows)).flatten(1, -2)  # (B, T, n)
    if isinstance(bias, EachOwn):
        y = torch.baddbmm(bias.rows.unsqueeze(1), tokens, rows.mT)
    else:
        y = torch.bmm(tokens, rows.mT)
        y = y if bias is None else y + bias
    return y.reshape(*x.shape[:-1], rows.shape[1])


def _addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """b + x W, with the tokens of all examples one after the other in x (B T, n), and W (n, m)."""
    if not isinstance(weight, EachOwn):
        return _added(x @ weight, bias)
    tokens = of_each(x, len(weight.rows))  # (B, T, n)
    return _added(torch.bmm(tokens, weight.rows).flatten(0, 1), bias)


def _layer_norm(
    x: Tensor, shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    if not isinstance(weight, EachOwn):
        return _added(functional.layer_norm(x, shape, weight, None, eps), bias)
    y = functional.layer_norm(x, shape, None, None, eps)
    return _added((of_each(y, len(weight.rows)).flatten(1, -2) * weight.rows.unsqueeze(1)).reshape(y.shape), bias)


def _added(y: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(bias, EachOwn):
        return y if bias is None else y + bias
    return (of_each(y, len(bias.rows)).flatten(1, -2) + bias.rows.unsqueeze(1)).reshape(y.shape)


def _embedding(
    ids: Tensor, weight: EachOwn, padding_idx: int | None = None, max_norm: float | None = None, **settings: Any
) -> Tensor:
    if padding_idx is not None or max_norm is not None:  # a token that does not train, or a largest norm
        raise NoRuleError("an embedding with settings has no rule for tensors of which each example has its own")
    rows = weight.rows
    tokens = of_each(ids, len(rows)).flatten(1)  # (B, T)
    return rows.gather(1, tokens.unsqueeze(-1).expand(-1, -1, rows.shape[-1])).reshape(*ids.shape, -1)


def _moved(own: EachOwn, *args: Any, **kwargs: Any) -> EachOwn:
    return EachOwn.of(own.rows.to(*args, **kwargs))


_RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    functional.layer_norm: _layer_norm,
    functional.embedding: _embedding,
    Tensor.to: _moved,
}
# Properties of a tensor that do not read its numbers.
_ABOUT = {Tensor.dtype, Tensor.device, Tensor.shape, Tensor.ndim, Tensor.requires_grad, Tensor.is_meta}
_ABOUT |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}
