"""Refusal of models and optimizers whose steps cannot be made private."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from secure_fed.errors import ModelError
from secure_fed.learning.models.architecture import mixes_experts, require_supported
from secure_fed.learning.models.devices import is_divided
from secure_fed.learning.models.dropout_and_checkpointing import is_checkpointing
from secure_fed.learning.training.objective import refuse_running_statistics


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
