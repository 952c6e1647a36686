"""Parameters with a separate value for every example of a batch; the model itself needs no change.

The examples of one batch can belong to many clients: the frozen layers run on all of them at once, and an adapted layer
multiplies each example by its own client's tensors. `EachOwn.of(rows)`, rows (B, *shape), replaces a parameter of this shape.
The operations that adapters and heads use have a rule; with x (B, ..., n), W (B, m, n), b and w (B, n) or (B, m),

    linear        y_i = x_i W_i^T + b_i     (`addmm` too: the layers of GPT-2, whose W is transposed)
    layer norm    y_i = norm(x_i) w_i + b_i     (also of root mean squares, and a product x_i w_i by itself)
    embedding     y_i = W_i[ids_i]

and everything else raises `NoRuleError`; a module of this project can read the values (`rows_of`), or keep the promise of
`ExampleWise`. If a model has several rows for each example, one after the other (the choices of a question), each of them has
its example's value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from secure_fed.errors import ModelError
from secure_fed.learning.models.matrix_products import FEW, product


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


class ExampleWise(nn.Module):
    """A layer of one input and one output, (B, ...) each, whose output for an example is a function of that example's input and
    of the layer's own parameters (not its children's).

    Its forward uses only operations that `torch.func` can batch: no branch on values, nothing random, nothing in place. So the
    layer can be called with parameters that differ between examples (`EachOwn`), and `training/common_passes/passes.py`
    computes each example's gradient by the layer's own backward pass over that example alone.
    """

    def __call__(self, x: Tensor) -> Any:
        given: Mapping[str, Any] = self._parameters
        own = {name: value.rows for name, value in given.items() if isinstance(value, EachOwn)}
        if not own:
            return super().__call__(x)
        shared = {name: value for name, value in given.items() if value is not None and name not in own}

        def of_one(values: Mapping[str, Tensor], x_i: Tensor) -> Tensor:
            y_i: Tensor = functional_call(self, {**shared, **values}, (x_i,))
            return y_i

        examples = len(next(iter(own.values())))
        y: Tensor = vmap(of_one)(own, of_each(x, examples))
        return y.flatten(0, 1)


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
    if max_norm is not None or settings.get("scale_grad_by_freq"):
        raise NoRuleError("an embedding with such settings has no rule for tensors of which each example has its own")
    rows = weight.rows
    tokens = of_each(ids, len(rows)).flatten(1).unsqueeze(-1)  # (B, T, 1)
    found = rows.gather(1, tokens.expand(-1, -1, rows.shape[-1]))
    if padding_idx is not None:  # a token whose row does not train
        found = torch.where(tokens == padding_idx % rows.shape[1], found.detach(), found)
    return found.reshape(*ids.shape, -1)


def _times(x: Tensor, other: Tensor) -> Tensor:
    """x w, the scale of a norm; x (B, ..., n) and w (n,)."""
    x, weight = (other, x) if isinstance(x, EachOwn) else (x, other)
    if not isinstance(weight, EachOwn) or isinstance(x, EachOwn) or weight.ndim != 1 or x.shape[-1:] != weight.shape:
        raise NoRuleError("a product has no rule for these tensors of which each example has its own")
    return (of_each(x, len(weight.rows)).flatten(1, -2) * weight.rows.unsqueeze(1)).reshape(x.shape)


def _rms_norm(x: Tensor, shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    y = functional.rms_norm(x, shape, None, eps)
    return y if weight is None else _times(y, weight)


def _moved(own: EachOwn, *args: Any, **kwargs: Any) -> EachOwn:
    return EachOwn.of(own.rows.to(*args, **kwargs))


_RULES: dict[Any, Callable[..., Any]] = {
    functional.linear: _linear,
    torch.addmm: _addmm,
    functional.layer_norm: _layer_norm,
    functional.embedding: _embedding,
    functional.rms_norm: _rms_norm,
    torch.mul: _times,
    Tensor.mul: _times,
    Tensor.__mul__: _times,
    Tensor.__rmul__: _times,
    Tensor.to: _moved,
}
# Properties of a tensor that do not read its numbers.
_ABOUT = {Tensor.dtype, Tensor.device, Tensor.shape, Tensor.ndim, Tensor.requires_grad, Tensor.is_meta}
_ABOUT |= {Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__}


_PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_AFTER_A_SUMMAND = (torch.addmm, Tensor.addmm)
_SEEN = 64  # with so many outputs of an example, a trial detects their rounding


class SmallProductsApart(TorchFunctionMode):
    """Computes matrix products with few outputs for each example, such as its scores, separately for each example.

    In one product for all examples, the rounding of a row can depend on its position. With thousands of outputs for each
    example a trial detects this; with three scores it may detect nothing, though the next three differ. For sizes in between,
    such as the output of an adapter's first matrix, a batched product computes each example by itself, as with tensors of its
    own, and a trial checks that it does.
    """

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.examples = examples

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        place = 1 if func in _AFTER_A_SUMMAND else 0
        bias = args[0] if place else None
        if func is functional.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
        if isinstance(bias, EachOwn) and not isinstance(args[place + 1], EachOwn):  # the product first, apart
            y = self.__torch_function__(torch.mm if place else func, types, args[place : place + 2])
            return _added(y, bias)
        numbers = -2 if func is functional.linear else -1  # the weight's dimension that the product has
        if (
            (func in _PRODUCTS or place)
            and len(args) > place + 1
            and self._small(args[place], args[place + 1], numbers)
        ):
            x, weight = args[place], args[place + 1]
            if func is functional.linear and x.numel() // x.shape[-1] * weight.shape[0] // self.examples >= _SEEN:
                y = torch.bmm(x.reshape(self.examples, -1, x.shape[-1]), weight.t().expand(self.examples, -1, -1))
                return (y if bias is None else y + bias).reshape(*x.shape[:-1], -1)
            parts = args[place].chunk(self.examples)
            return torch.cat([func(*args[:place], part, *args[place + 1 :], **kwargs) for part in parts])
        return func(*args, **kwargs)

    def _small(self, x: Any, weight: Any, numbers: int) -> bool:
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.ndim != 2 or x.ndim < 2:
            return False
        if isinstance(weight, EachOwn):  # separate for each example already
            return False
        rows = x.numel() // max(1, x.shape[-1])
        divided = self.examples > 1 and len(x) > 0 and len(x) % self.examples == 0
        return divided and rows * weight.shape[numbers] // self.examples < FEW
