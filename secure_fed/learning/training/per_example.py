"""The gradient of each example of a batch, computed through `Objective.losses`.

Two ways, both functions (objective, collate, placed, items) -> {name: (B, *shape)} over the moving (trained) tensors:

    one_by_one   every example in a batch of its own, by plain autograd: right by definition, for every model.
    by_layer     one forward and one backward pass for the whole batch. For a layer with input x and output y the pass gives
                 dL_i/dy_i of every example i at once, and the layer's rule computes dL_i/dw from x_i and dL_i/dy_i (for a
                 linear layer the product of both, summed over tokens). The rules are Opacus's; the pass is ours, because
                 Opacus's hooks stay on the model and also compute the summed gradients, which are not needed here. Our own
                 layers (`ExampleWise`) need no rule: their backward pass is batched over examples.

`by_layer` is silently wrong for a layer that also processes an input shared by the examples (relative position embeddings, as
in DeBERTa), for tensors used outside their layer, and for code that overwrites a layer's output. So it is used only after
`gradient_trial.path_for` has compared both on examples with the given model; otherwise `one_by_one` is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from secure_fed.errors import ModelError
from secure_fed.learning.models.adapters.own_tensors import EachOwn
from secure_fed.learning.models.adapters.parameters import ExampleWise
from secure_fed.learning.tasks.task import Collate
from secure_fed.learning.training.local import Placed, require_one_each
from secure_fed.learning.training.objective import Objective, to_device

Gradients = dict[str, Tensor]
Path = Callable[[Objective, Collate, Placed, Sequence[Any]], Gradients]


def losses(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> Tensor:
    """(B,) losses of the items as one batch, differentiable in `placed.moving`."""
    found = objective.losses(placed.held | placed.moving, to_device(collate(items), objective.device))
    require_one_each(found, len(items))
    return found


def one_by_one(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> Gradients:
    """Each example in a batch of its own."""
    moving = list(placed.moving.values())
    each = []
    for item in items:
        loss = losses(objective, collate, placed, [item]).sum()
        each.append(torch.autograd.grad(loss, moving, allow_unused=True, materialize_grads=True))
    return {name: torch.stack(parts) for name, parts in zip(placed.moving, zip(*each, strict=True), strict=True)}


class _Call(NamedTuple):
    """One use of a layer: its name, its input and its output."""

    name: str
    layer: nn.Module
    x: Tensor
    y: Tensor
    held: Gradients  # the layer's own tensors in this use


def by_layer(objective: Objective, collate: Collate, placed: Placed, items: Sequence[Any]) -> Gradients:
    """All examples in one pass; ModelError if a moving tensor's layer has no rule, or no input of each example."""
    calls: list[_Call] = []
    with _noting(objective.model, placed.moving, calls), SmallProductsApart(len(items)):
        total = losses(objective, collate, placed, items).sum()
    backprops = torch.autograd.grad(total, [call.y for call in calls], allow_unused=True) if calls else ()
    found: Gradients = {}
    for call, backprop in zip(calls, backprops, strict=True):
        if backprop is not None:
            for name, gradient in _by_rule(call, backprop, len(items)).items():
                if name in placed.moving:
                    found[name] = found[name] + gradient if name in found else gradient
    return {
        name: found[name] if name in found else tensor.new_zeros((len(items), *tensor.shape))
        for name, tensor in placed.moving.items()
    }


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
        numbers = -2 if func is functional.linear else -1  # the weight's dimension that the product has
        if (
            (func in _PRODUCTS or place)
            and len(args) > place + 1
            and self._small(args[place], args[place + 1], numbers)
        ):
            if func is functional.linear and self._seen(args[0], args[1]):
                return self._batched(*args, **kwargs)
            parts = args[place].chunk(self.examples)
            return torch.cat([func(*args[:place], part, *args[place + 1 :], **kwargs) for part in parts])
        return func(*args, **kwargs)

    def _batched(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.bmm(x.reshape(self.examples, -1, x.shape[-1]), weight.t().expand(self.examples, -1, -1))
        return (y if bias is None else y + bias).reshape(*x.shape[:-1], -1)

    def _seen(self, x: Tensor, weight: Tensor) -> bool:
        return x.numel() // x.shape[-1] * weight.shape[0] // self.examples >= _SEEN

    def _small(self, x: Any, weight: Any, numbers: int) -> bool:
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.ndim != 2 or x.ndim < 2:
            return False
        if isinstance(weight, EachOwn):  # separate for each example already
            return False
        rows = x.numel() // max(1, x.shape[-1])
        divided = self.examples > 1 and len(x) > 0 and len(x) % self.examples == 0
        return divided and rows * weight.shape[numbers] // self.examples < _FEW


def _by_rule(call: _Call, backprop: Tensor, size: int) -> Gradients:
    if not call.x.ndim or not call.y.ndim or len(call.x) != size or len(call.y) != size:
        raise ModelError(
            f"layer {call.name} of the model is given {tuple(call.x.shape)} in a batch of {size} examples: an input that "
            "examples share has no per-example gradients; keep the layer's tensors frozen"
        )
    x, backprop = (part.float() if part.dtype in _HALF else part for part in (call.x, backprop))
    prefix = f"{call.name}." if call.name else ""
    if isinstance(call.layer, ExampleWise):
        return {prefix + name: gradient for name, gradient in _pulled_back(call, x.detach(), backprop).items()}
    gradients = _rules()[type(call.layer)](call.layer, [x.detach()], backprop)
    own = {id(parameter): name for name, parameter in call.layer.named_parameters(recurse=False)}
    return {prefix + own[id(parameter)]: gradient for parameter, gradient in gradients.items()}


def _pulled_back(call: _Call, x: Tensor, backprop: Tensor) -> Gradients:
    """{name: (B, *shape)} of the layer's own tensors: dL_i/dw by the layer's backward pass from dL_i/dy_i, batched over i."""
    held = {name: tensor.detach().to(x.dtype) for name, tensor in call.held.items()}

    def of_one(x_i: Tensor, backprop_i: Tensor) -> Gradients:
        def output(tensors: Gradients) -> Tensor:
            y: Tensor = functional_call(call.layer, tensors, (x_i.unsqueeze(0),))
            return y

        pull = vjp(output, held)[1]
        gradients: Gradients = pull(backprop_i.unsqueeze(0))[0]
        return gradients

    found: Gradients = vmap(of_one)(x, backprop)
    return found


@contextmanager
def _noting(model: nn.Module, moving: Mapping[str, Tensor], calls: list[_Call]) -> Iterator[None]:
    """Record in `calls` every use, within the block, of a layer with a moving tensor; the model is not changed."""
    owners = dict.fromkeys(name.rpartition(".")[0] for name in moving)
    hooks = []
    try:
        for name in owners:
            layer = model.get_submodule(name)
            if type(layer) not in _rules() and not isinstance(layer, ExampleWise):
                raise ModelError(f"layer {name} of the model is {type(layer).__name__}, for which there is no rule")
            hooks.append(layer.register_forward_hook(partial(_note, calls, name), with_kwargs=True))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note(
    calls: list[_Call], name: str, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
) -> None:
    if len(args) != 1 or kwargs or not y.requires_grad:
        raise ModelError(f"layer {name} of the model is not called with one input, or does not pass on a gradient")
    calls.append(_Call(name, layer, args[0], y, dict(layer.named_parameters(recurse=False))))


def _rules() -> Mapping[type[nn.Module], Callable[[nn.Module, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]]:
    from opacus.grad_sample import GradSampleModule

    rules: dict[Any, Any] = GradSampleModule.GRAD_SAMPLERS
    return rules


_PRODUCTS = (functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm)
_AFTER_A_SUMMAND = (torch.addmm, Tensor.addmm)
_FEW = 2048
_SEEN = 64  # with so many outputs of an example, a trial detects their rounding
_HALF = (torch.bfloat16, torch.float16)
