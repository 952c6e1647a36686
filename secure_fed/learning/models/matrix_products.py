"""Matrix products of linear layers on processors where torch's own are slow: by oneDNN, and those of thin matrices.

torch passes float32 products on x86 to MKL, which uses AVX-512 on Intel's processors only; oneDNN, which torch also contains,
uses it on every processor that has it. On an AMD EPYC of 2024 oneDNN is twice as fast. Both compute in full float32.

oneDNN computes a layer's product if its input is (B, T, n) with many numbers for each example, as in a transformer. torch
computes the rest: small products, which may have to be separate for each example (`per_example.SmallProductsApart`), other
types and devices, and tensors that differ between examples (`EachOwn`).

The factors of LoRA are thin, r by n or m by r. MKL is slower at three of their six products than at the same product
transposed, so `hasten_thin` transposes them.
"""

from __future__ import annotations

import platform
import sys
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW = 2048
"""The fewest numbers of an example with which its product is computed together with others' without a closer check."""


def hasten(model: nn.Module) -> None:
    """Make the linear layers of `model` compute by `product` if that is faster; a copy of the model does so too."""
    if not faster():
        return
    of_gpt2 = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    for layer in model.modules():
        own = "_old_forward" if "_old_forward" in vars(layer) else "forward"  # accelerate's hooks call the former
        if "forward" in vars(layer) and own == "forward":  # a custom forward
            continue
        if type(layer) is nn.Linear:
            setattr(layer, own, partial(_linear, layer))
        elif type(layer) is of_gpt2:
            setattr(layer, own, partial(_transposed, layer))


@cache
def faster() -> bool:
    """Whether oneDNN is the faster of torch's two libraries here: AVX-512 on a processor that is not Intel's."""
    return (
        torch.backends.mkl.is_available()
        and torch.backends.mkldnn.is_available()
        and torch.backends.cpu.get_cpu_capability() == "AVX512"
        and "GenuineIntel" not in _processor()
        and _there()
    )


def _there() -> bool:
    """Whether this torch has the undocumented operation with the arguments used here."""
    x, weight = torch.arange(6.0).view(2, 3), torch.ones(4, 3)
    try:
        return torch.equal(_by_onednn(x, weight, None), x @ weight.t())
    except (AttributeError, RuntimeError, TypeError):
        return False


def _by_onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    return file.read_text(encoding="utf-8", errors="replace") if file.exists() else platform.processor()


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, as `functional.linear` but for its rounding: by oneDNN where that is faster and the product is large."""
    if faster() and _large(x, weight) and (bias is None or _plain(bias)):
        found: Tensor = _Product.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return found
    return functional.linear(x, weight, bias)


def hasten_thin(layer: nn.Linear) -> None:
    """Make a thin layer without bias compute by `_Thin` where it trains; a copy of the layer does so too."""
    layer.forward = partial(_thin, layer)  # type: ignore[method-assign]


def _thin(layer: nn.Linear, x: Tensor) -> Tensor:
    trains = _plain(x) and _plain(layer.weight) and layer.weight.requires_grad and torch.is_grad_enabled()
    if trains and x.ndim > 1 and not torch.is_autocast_enabled("cpu"):
        found: Tensor = _Thin.apply(x, layer.weight)  # type: ignore[no-untyped-call]
        return found
    return functional.linear(x, layer.weight)


def _linear(layer: nn.Linear, x: Tensor) -> Tensor:
    return product(x, layer.weight, layer.bias)


def _transposed(layer: Any, x: Tensor) -> Tensor:
    """The forward of GPT-2's layers, whose weight is (n, m)."""
    if _plain(layer.weight) and _large(x, layer.weight.t()):
        return product(x, layer.weight.t(), layer.bias)
    found: Tensor = type(layer).forward(layer, x)
    return found


def _large(x: Tensor, weight: Tensor) -> bool:
    return _plain(x) and _plain(weight) and x.ndim == 3 and x.shape[1] * min(weight.shape) >= FEW


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


class _Product(torch.autograd.Function):
    """y = x W^T + b with x (B, T, n), W (m, n); dx = dy W by the same `product`, for derivatives of any order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None, weight)
        rows = x.shape[0] * x.shape[1]
        filled = _filled(x.reshape(rows, -1))
        return _by_onednn(filled, weight, bias)[:rows].view(*x.shape[:2], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            product(dy, weight.t()) if of_x else None,
            dy.flatten(0, 1).t() @ x.flatten(0, 1) if of_weight else None,
            dy.sum((0, 1)) if of_bias else None,
        )


class _Thin(torch.autograd.Function):
    """y = x W^T with x (..., n), W (m, n), m or n small; derivatives of any order."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> Tensor:
        rows = x.flatten(0, -2)
        down = len(weight) < weight.shape[1]
        y = (weight @ rows.t()).t().contiguous() if down else rows @ weight.t()
        return y.view(*x.shape[:-1], len(weight))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight = ctx.needs_input_grad
        rows, d_rows = x.flatten(0, -2), dy.flatten(0, -2)
        if len(weight) < weight.shape[1]:
            dx, dw = (d_rows @ weight if of_x else None), (d_rows.t() @ rows if of_weight else None)
        else:
            dx = d_rows @ weight.t().contiguous().t() if of_x else None
            dw = (rows.t() @ d_rows).t() if of_weight else None
        return None if dx is None else dx.view_as(x), dw


def _filled(x: Tensor) -> Tensor:
    """(N, n): x with rows of zeros appended, N being one of eight numbers between two powers of two.

    oneDNN compiles a kernel for every shape, which takes longer than the product and half a megabyte.
    """
    rows = len(x)
    missing = -rows % (1 << max(0, rows.bit_length() - 4))
    if not missing:
        return x
    filled = x.new_empty(rows + missing, x.shape[1])
    filled[:rows] = x
    filled[rows:].zero_()
    return filled


_PLAIN = (Tensor, nn.Parameter)
