"""The private step of a user's own training loop: DP-SGD under the loop's own optimizer.

    g = (1 / d) (sum_{i in S} clip_C(g_i) + N(0, (z C (1 + s))^2)),    d = q n where the loop's loss is a mean, 1 where a sum

S is the Poisson sample that the loader drew, clip_C scales to an L2 norm of at most C over all trained parameters together, s
is the slack of `account.Allowance`, and a gradient that is not finite counts as zero. When the loop calls `optimizer.step()`,
the step is charged and g is computed; the optimizer steps by g, and everything that it computes from g is post-processing.

Guarantee: adding or removing one example changes the sum by at most C (1 + s), where C s is for the other examples, whose
gradients may be rounded otherwise. So a step is a Poisson-sampled Gaussian mechanism of noise multiplier z. Dropout masks are
drawn in secret. Models and optimizers whose steps cannot be made private are refused by `require_trainable`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from privacy.entropy import Stream
from privacy.errors import BudgetExhausted
from privacy.mechanisms import Mechanism
from secure_fed.errors import ModelError, OwnLoopError
from secure_fed.learning.models.architecture import mixes_experts, require_supported
from secure_fed.learning.models.devices import is_divided
from secure_fed.learning.models.dropout_and_checkpointing import is_checkpointing
from secure_fed.learning.training.local import seeded
from secure_fed.learning.training.objective import changed, checksums, refuse_running_statistics
from secure_fed.learning.training.trials import WithoutDropout
from secure_fed.own_loop.account import Allowance
from secure_fed.own_loop.batches import Batch
from secure_fed.own_loop.rehearsal import Reduction, Rehearsal, float64_place

_AWAY = 0.05  # the standard deviation, as in trials of federated runs
_SLACK = 1e-4  # of the sum of the rows' norms: rounding in float32 is far below it
_FLOOR = 1e-6  # of the same over all parameters: a gradient that is zero by symmetry is rounding on both sides


class PrivateSteps:
    """Model and optimizer of a loop, whose steps are private from now on.

    trained: all parameters that require gradients, by name. charge: writes the charge for the step of that number to disk, or
    refuses it. left: the number of steps left. expected: the expected size of a batch.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        trained: Mapping[str, nn.Parameter],
        mechanism: Mechanism,
        allowance: Allowance,
        expected: float,
        stream: Stream,
        charge: Callable[[int], None],
        left: Callable[[], int],
    ) -> None:
        self._model, self._optimizer, self._trained = model, optimizer, dict(trained)
        self._mechanism, self._allowance, self._expected = mechanism, allowance, expected
        self._stream, self._charge, self._left = stream, charge, left
        self._rng = np.random.default_rng(stream.words(4).tolist())  # of dropout
        self._batch: Batch | None = None
        self._rehearsal = Rehearsal(allowance)
        self._buffers: dict[str, Tensor] = {}
        self._checksums: dict[str, int] = {}
        self._moved: list[nn.Parameter] = []
        self._during = ExitStack()
        self.made = 0
        self._gradients = BackwardGradients(model, trained)
        try:
            self._handles = [
                optimizer.register_step_pre_hook(self._before),
                model.register_forward_pre_hook(self._enter),
                model.register_forward_hook(self._leave, always_call=True),
            ]
        except AttributeError as error:  # an optimizer whose class left out its parent's __init__
            self._gradients.close()
            raise OwnLoopError(
                f"{type(optimizer).__name__} calls no hooks before its steps, where noise is added; give an optimizer of torch"
            ) from error

    @property
    def reduction(self) -> Reduction | None:
        """Of the loss; None until this epoch's rehearsal has found it."""
        return self._rehearsal.reduction

    def begin(self, batch: Batch) -> None:
        """Called before the loop gets a batch."""
        before = self._batch
        if before is not None and (before.forward or not before.rehearsal):
            raise OwnLoopError(
                "the loop went on to another batch without optimizer.step(): whether a step is made must not depend on data, "
                "and gradients are not accumulated over batches; call optimizer.step() once for every batch of the wrapped "
                "loader, leave its loop after a step and not before one, and evaluate on the loader that was given to wrap()"
            )
        if not batch.rehearsal and self.reduction is None:
            raise OwnLoopError(
                "the loop left out batches of the rehearsal, which come first and may have one example: without them the "
                "loss is unknown; call optimizer.step() once for every batch of the wrapped loader"
            )
        if not batch.rehearsal and self._left() < 1:
            raise BudgetExhausted(
                f"the loop starts step {self.made + 1}, beyond its budget of {self.made}: give wrap() more epochs or steps, "
                "which takes more noise or epsilon, and train anew"
            )
        if batch.rehearsal and batch.rehearsal.number == 0:
            self._rehearsal = Rehearsal(self._allowance)
        self._put_back()
        if batch.rehearsal:
            self._move_from_zero()
        self._buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        self._checksums = checksums(dict(self._model.named_parameters()))
        self._gradients.clear()
        self._batch = batch

    def end(self, batch: Batch) -> None:
        """Called when the loop leaves a batch of a rehearsal, also without a step. Only the current batch has a say."""
        if batch is self._batch:
            self._put_back()

    def _move_from_zero(self) -> None:
        """Move the trained tensors that are zero (a new head, LoRA's B), as far in every batch of a rehearsal.

        At zero the gradient of what they multiply vanishes, and so does that of terms in the squares or products of scores:
        a coupling would show from the first step on, and not before.
        """
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for one in self._trained.values():
                if not bool(one.any()):
                    one.copy_(_AWAY * torch.randn(one.shape, generator=generator))
                    self._moved.append(one)

    def _put_back(self) -> None:
        """Undo `_move_from_zero`."""
        with torch.no_grad():
            while self._moved:
                self._moved.pop().zero_()

    def _enter(self, model: nn.Module, args: Any) -> None:
        """Before a forward pass that may train: dropout masks are drawn in secret; a rehearsal has no dropout."""
        if self._batch is None or not (model.training and torch.is_grad_enabled()):
            return
        device = next(iter(self._trained.values())).device
        if torch.is_autocast_enabled(device.type):
            raise ModelError(
                "the loop computes under autocast, where the rounding of an example's gradient by its batch is more than the "
                "noise covers; compute in float32"
            )
        self._batch.forward = True
        self._during.enter_context(seeded(device, self._rng))
        if self._batch.rehearsal:
            self._during.enter_context(WithoutDropout())

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self._during.close()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Replace the plain gradient by the noised one, or raise."""
        try:
            released = self._of_batch(args, kwargs)
        finally:
            self._put_back()
        for name, gradient in released.items():
            self._trained[name].grad = gradient

    def _of_batch(self, args: Any, kwargs: Any) -> dict[str, Tensor]:
        """The noised gradient of the current batch, or an empty dict in a rehearsal."""
        if any(one is not None for one in (*args[1:], *kwargs.values())):
            raise OwnLoopError(
                "optimizer.step() was given a closure, which makes several passes a step; call it without one"
            )
        batch = self._batch
        if batch is None or not batch.forward:
            raise OwnLoopError(
                "optimizer.step() came without a batch of the wrapped loader that the model saw: make one step for each batch "
                "of that loader, after model.train() and model(...)"
            )
        self._require_same_parameters()
        self._require_unchanged()
        found = self._gradients.of_examples(batch.rows)
        released = {} if batch.rehearsal else self._released(found, batch)
        if batch.rehearsal:
            self._rehearsal.add(batch.rehearsal, found, self._gradients.summed())
        self._gradients.clear()
        # The optimizer would step a frozen parameter along a gradient from before it was frozen, without noise.
        for group in self._optimizer.param_groups:
            for one in group["params"]:
                if not one.requires_grad:
                    one.grad = None
        self._batch = None
        return released

    def _released(self, found: Mapping[str, Tensor], batch: Batch) -> dict[str, Tensor]:
        """Charge for the noised mean or sum, then compute it."""
        rows = batch.rows if self.reduction == "mean" else 1
        total = clipped_sum(found, float(rows), self._mechanism, self._allowance.clip_norm)
        if not batch.counted:
            total = {name: torch.zeros_like(part) for name, part in total.items()}
        self._charge(self.made)
        self.made += 1
        divisor = self._expected if self.reduction == "mean" else 1.0
        noised = self._mechanism.noised(total, self._allowance.sensitivity, self._stream)
        return {name: (part / divisor).to(self._trained[name]) for name, part in noised.items()}

    def _require_unchanged(self) -> None:
        """Every buffer and every parameter is as when the loop got the batch: no pass moved it."""
        if moved := changed(self._checksums, dict(self._model.named_parameters())):
            raise ModelError(
                f"parameter {moved[0]} of the model changes before optimizer.step(), so it may keep statistics of the "
                "examples, which no noise covers; give a model whose passes change no parameter, and change others after a step"
            )
        for name, buffer in self._model.named_buffers():
            if name not in self._buffers or not torch.equal(buffer, self._buffers[name]):
                raise ModelError(
                    f"buffer {name} of the model changes before optimizer.step(), so it may keep statistics of the examples, "
                    "which no noise covers; give a model whose passes change no buffer, and change others after a step"
                )

    def _require_same_parameters(self) -> None:
        known = {id(parameter) for parameter in self._trained.values()}
        stepped = {id(one) for group in self._optimizer.param_groups for one in group["params"] if one.requires_grad}
        if known != {id(one) for one in self._model.parameters() if one.requires_grad} or known != stepped:
            raise OwnLoopError(
                "the trained parameters differ from the wrapped ones; freeze or unfreeze before wrap(), and give the "
                "optimizer all of them and no others"
            )

    def close(self) -> None:
        """Remove all hooks from the model and the optimizer: later training is not private."""
        for handle in self._handles:
            handle.remove()
        self._put_back()
        self._gradients.close()


def clipped_sum(
    found: Mapping[str, Tensor], factor: float, mechanism: Mechanism, clip_norm: float
) -> dict[str, Tensor]:
    """{name: shape} sum_i clip_C(factor g_i), in float64, from {name: (B, *shape)}."""
    squares = [_rows(each, factor).square().sum(1) for each in found.values()]
    norms = torch.stack(squares).sum(0).sqrt().tolist()
    scales = torch.tensor([mechanism.scale(partial(float, norm), clip_norm) for norm in norms], dtype=torch.float64)
    total = {}
    for name, each in found.items():  # one at a time, since float64 takes twice the memory
        rows, factors = _rows(each, factor), scales.to(float64_place(each))
        used = factors > 0  # infinity times zero is NaN
        total[name] = (factors[used] @ rows[used]).view(each.shape[1:])
    return total


def _rows(each: Tensor, factor: float) -> Tensor:
    return each.detach().reshape(len(each), -1).to(float64_place(each), torch.float64) * factor


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
    """{name: (B, *shape)} the per-example gradients dL/dw of a batch, L being the loss on which the loop calls `backward`.

    They are made by Opacus's rules for the layers. After a backward pass the summed gradients, which have no noise, are removed
    from the parameters: `p.grad` is None, and an optimizer that the loop steps by mistake finds no gradient.

    A backward pass that would pair an example's loss with the inputs of another pass is refused in every step, by counting
    passes. Beyond that a rule may be wrong for a model, as for a parameter used outside of its layer: then a gradient misses a
    part, which is an error of training and not of privacy, since every row still follows from its own example. Rehearsals
    compare rows with plain autograd, one by one and after clipping. In every step the rows' sum must be autograd's gradient,
    which is all that autograd gives for a batch; a part below 10^-4 of the sum of the rows' norms is not noticed.
    """

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


def require_trainable(model: nn.Module, optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """The trained parameters by name: those that require gradients. The optimizer must have all of them and no others."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if not trained:
        raise ModelError(
            "no parameter of the model requires a gradient, so nothing trains; unfreeze some before wrap()"
        )
    _require_same(trained, optimizer)
    refuse_running_statistics(model)
    if is_checkpointing(model):
        raise ModelError(
            "gradient checkpointing is on in the model, which computes layers again in the backward pass, where gradients of "
            "examples are recorded; turn it off (model.gradient_checkpointing_disable()), and give smaller batches"
        )
    if is_divided(model):
        raise ModelError("accelerate has divided the model over devices; load it without device_map, on one device")
    require_supported(model, trained)
    if mixes_experts(model):
        raise ModelError(
            "the model mixes experts, which work on the tokens of all examples together; give a dense model"
        )
    if isinstance(model, DataParallel | DistributedDataParallel):
        raise ModelError(f"the model is a {type(model).__name__}; give the module inside it, on one device")
    _refuse_layers_without_gradients_of_examples(model)
    for name, one in model.named_parameters():
        if one.dtype not in (torch.float32, torch.float64):
            raise ModelError(
                f"parameter {name} is {str(one.dtype).removeprefix('torch.')}, where the rounding of an example's gradient by "
                "its batch is more than the noise covers; load the model in float32"
            )
    return trained


def _require_same(trained: dict[str, nn.Parameter], optimizer: Optimizer) -> None:
    stepped = {id(one) for group in optimizer.param_groups for one in group["params"] if one.requires_grad}
    own = {id(one) for one in trained.values()}
    for name, one in trained.items():
        if id(one) not in stepped:
            raise ModelError(
                f"parameter {name} requires a gradient, but the optimizer does not have it: another optimizer would step it "
                "without noise; freeze it, or give it to the optimizer"
            )
    if stepped - own:
        raise ModelError(
            f"the optimizer has {len(stepped - own)} parameters that are not the model's: give one module that has all "
            "of them"
        )


def _refuse_layers_without_gradients_of_examples(model: nn.Module) -> None:
    for name, module in model.named_modules():
        trained = any(one.requires_grad for one in module.parameters(recurse=False))
        if isinstance(module, nn.MultiheadAttention) and any(one.requires_grad for one in module.parameters()):
            raise ModelError(
                f"{name or 'the model'} is torch's MultiheadAttention, which hands its weights to one fused function, so that "
                "no example's gradient can be seen; freeze it, or put opacus.layers.DPMultiheadAttention in its place"
            )
        if isinstance(module, nn.RNNBase) and any(one.requires_grad for one in module.parameters()):
            raise ModelError(
                f"{name or 'the model'} is torch's {type(module).__name__}, which computes a whole sequence in one function, "
                f"so that no example's gradient can be seen; freeze it, or put opacus.layers.DP{type(module).__name__} in its "
                "place"
            )
        if trained and getattr(module, "sparse", False):
            raise ModelError(f"{name or 'the model'} is an embedding with sparse gradients; make it with sparse=False")
