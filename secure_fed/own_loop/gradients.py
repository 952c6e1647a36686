"""Per-example gradients of the backward pass of a user's own loop, by Opacus's rules for the layers.

After a backward pass the summed gradients, which have no noise, are removed from the parameters: `p.grad` is None, and an
optimizer that the loop steps by mistake finds no gradient.

A backward pass that would pair an example's loss with the inputs of another pass is refused in every step, by counting passes.
Beyond that a rule may be wrong for a model, as for a parameter used outside of its layer: then a gradient misses a part, which
is an error of training and not of privacy, since every row still follows from its own example. Rehearsals compare rows with
plain autograd, one by one and after clipping. In every step the rows' sum must be autograd's gradient, which is all that
autograd gives for a batch; a part below 10^-4 of the sum of the rows' norms is not noticed.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn

from secure_fed.errors import ModelError, OwnLoopError

_SLACK = 1e-4  # of the sum of the rows' norms: rounding in float32 is far below it
_FLOOR = 1e-6  # of the same over all parameters: a gradient that is zero by symmetry is rounding on both sides


class _Hooks(GradSampleHooks):  # type: ignore[misc]  # it has no types
    """Opacus's hooks, with an error of our own for a layer that was not in training mode in the forward pass."""

    def capture_backprops_hook(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        if self.hooks_enabled and not getattr(module, "activations", None):
            raise OwnLoopError(
                f"a backward pass came through a {type(module).__name__} not in training mode, or whose batch is over: "
                "call model.train() before model(...), and loss.backward() once for each batch"
            )
        super().capture_backprops_hook(module, *args, **kwargs)


class BackwardGradients:
    """{name: (B, *shape)} the per-example gradients dL/dw of a batch, L being the loss on which the loop calls `backward`."""

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        self._trained = dict(trained)
        self._summed: dict[str, Tensor] = {}
        self._model = model
        warnings.filterwarnings("ignore", "Full backward hook is firing")  # it does for layers that read the input
        try:
            self._hooks = _Hooks(model, loss_reduction="sum")
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"the model has no gradients of single examples: {error}") from error
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, name))
            for name, parameter in self._trained.items()
        ]
        self.clear()

    def _take(self, name: str, parameter: Tensor) -> None:
        found = parameter.grad
        parameter.grad = None
        if found is not None:
            self._summed[name] = self._summed[name] + found if name in self._summed else found

    def summed(self) -> dict[str, Tensor]:
        """Autograd's gradient for the whole batch."""
        return {name: self._summed.get(name, torch.zeros_like(p)) for name, p in self._trained.items()}

    def of_examples(self, rows: int) -> dict[str, Tensor]:
        """OwnLoopError unless there was one backward pass over a batch of `rows` examples; ModelError if they do not add up."""
        if not self._summed:
            raise OwnLoopError(
                "optimizer.step() came after a forward pass without loss.backward(): whether there is a backward pass must not "
                "depend on data; call loss.backward() once for every batch of the wrapped loader"
            )
        found = {}
        for name, parameter in self._trained.items():
            if hasattr(parameter, "_current_grad_sample"):  # more forward than backward passes through its layer
                raise OwnLoopError(
                    f"a forward pass without a backward pass came between, and left part of the gradient of {name} to be "
                    "computed: call model(...) for figures in model.eval() or under torch.no_grad()"
                )
            gradient = getattr(parameter, "grad_sample", None)
            if isinstance(gradient, list):
                raise OwnLoopError(
                    f"{len(gradient)} backward passes came before a step, and the noise is for one: call optimizer.step() "
                    "after each loss.backward(), without accumulating gradients over batches"
                )
            if gradient is not None and len(gradient) != rows:
                raise OwnLoopError(
                    f"{name} was given {len(gradient)} examples, and the batch that the wrapped loader drew has {rows}: "
                    "train on each of its batches as a whole, and on no other loader's, or freeze that parameter if the "
                    "examples of a batch share its input, as they do positions"
                )
            found[name] = torch.zeros((rows, *parameter.shape)).to(parameter) if gradient is None else gradient.detach()
        self._require_whole(found)
        return found

    def _require_whole(self, found: Mapping[str, Tensor]) -> None:
        norms = {name: float(each.reshape(len(each), -1).norm(dim=1).sum()) for name, each in found.items()}
        floor = sum(norms.values())
        for name, summed in self.summed().items():
            apart = float(torch.linalg.vector_norm(found[name].sum(0) - summed))
            if apart > _SLACK * norms[name] + _FLOOR * floor:  # False if a gradient is not finite
                raise ModelError(
                    f"the gradients of the examples do not add up to that of {name}: the parameter is used outside of its "
                    "layer, the examples of a batch share it, or the loss has a term of its own on the parameters (use the "
                    "optimizer's weight_decay); freeze the parameter, or take that out"
                )

    def clear(self) -> None:
        """Forget the last pass, and forward passes that no backward pass followed."""
        self._summed.clear()
        for parameter in self._trained.values():
            parameter.grad = None
            parameter.grad_sample = None  # type: ignore[attr-defined]
            parameter._forward_counter = 0  # type: ignore[attr-defined]
            if hasattr(parameter, "_current_grad_sample"):
                del parameter._current_grad_sample
        for module in self._model.modules():
            for left in ("activations", "max_batch_len"):
                module.__dict__.pop(left, None)  # not by attribute: PEFT's wrappers show their inner module's

    def close(self) -> None:
        """Leave the model as it was."""
        self.clear()
        for handle in self._handles:
            handle.remove()
        self._hooks.cleanup()


def float64_place(tensor: Tensor) -> torch.device:
    """The tensor's device, or the CPU if the device has no float64 (MPS)."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
