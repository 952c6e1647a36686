"""Which models example-level privacy can protect, and by which path their per-example gradients are made.

A guarantee rests on two things that a model can break: that an example's loss is its own affair, and that the gradient taken
for an example's is its gradient. What can be seen in the model's layers is refused by `require_supported`; the rest is tried
out by `path_for`, on examples and with every moving tensor away from zero, since at the usual start B = 0 the gradient of A
vanishes and would prove nothing.

The trial reads a few private examples. What comes of it is a property of the model (whether it couples examples, and
which path is right for it), not of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from secure_fed.errors import MethodError, ModelError, SecureFedError
from secure_fed.per_example import Gradients, Path, by_layer, losses, one_by_one
from secure_fed.training import Collate, Objective, Placed, seeded

# PEFT's starts that look at data: activations (EVA, CorDA), or gradients (LoRA-GA).
_DATA_DRIVEN = ("eva", "corda", "lora_ga", "loraga")


def require_data_free_start(model: nn.Module) -> None:
    """Refuse adapters that PEFT started from the data: the first state would tell of them, un-noised, whatever the unit."""
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, Mapping) else ():
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.lower() in _DATA_DRIVEN:
            raise MethodError(
                f"the model's adapters were started by {start!r}, which reads the data, so the start itself would leak them; "
                "use a start without data, or set privacy.unit to none"
            )


def require_supported(model: nn.Module, trainable: Collection[str]) -> None:
    """Refuse, by name, what has no proven per-example gradients."""
    require_data_free_start(model)
    for name, module in model.named_modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ModelError(
                f"gradient checkpointing is on in {name or type(model).__name__}, which runs layers a second time, unseen by "
                "what takes per-example gradients; turn it off, and set training.microbatch to save memory"
            )
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
            raise ModelError(
                f"layer {name} of the model is {type(module).__name__}, which keeps statistics of the examples; "
                "give a model with GroupNorm or LayerNorm there"
            )
    for name in trainable:
        reason = next((reason for part, reason in _UNPROVEN.items() if part in name), None)
        if reason:
            raise MethodError(f"{name} cannot train under example-level privacy: {reason}")


_UNPROVEN = {
    "lora_magnitude_vector": "the per-example gradients of DoRA's magnitudes are not proven; set use_dora to false",
    "lora_embedding_": "the per-example gradients of LoRA on embeddings are not proven; adapt linear layers only",
    "trainable_tokens": "the per-example gradients of trainable_token_indices are not proven; leave it out",
    "token_adapter": "the per-example gradients of trainable_token_indices are not proven; leave it out",
}


def gradients_of(
    objective: Objective, collate: Collate, placed: Placed, examples: Sequence[Any]
) -> Callable[[Placed, Sequence[Any]], Gradients]:
    """Per-example gradients at `placed`, by the path that is right for the tensors that move.

    It is tried out with the first that has two examples; to one that has a single one there is nothing to tell apart.
    """
    moving = frozenset(placed.moving)
    if len(examples) > 1 and moving not in objective.paths:
        objective.paths[moving] = path_for(objective, collate, placed, examples)
    return partial(objective.paths.get(moving, one_by_one), objective, collate)


def path_for(objective: Objective, collate: Collate, placed: Placed, examples: Sequence[Any]) -> Path:
    """`by_layer` where it gives what `one_by_one` gives on a probe of `examples`, else `one_by_one`.

    A model that draws random numbers beyond dropout takes `one_by_one`, for it may draw once for all examples of a pass: which
    of them share a draw would then go by who else is there, and one example more would move the others' gradients.

    ModelError if the loss of an example depends on the batch it is in, or if the model keeps statistics of what it has seen.
    The objective is left in training mode, its buffers as they were.
    """
    probe = probe_of(examples, collate)
    with still(objective, lambda: losses(objective, collate, placed, probe)) as draws:
        away = _moved_away(placed)
        _require_uncoupled(objective, collate, away, probe)
        if draws:
            return one_by_one
        try:
            quick = by_layer(objective, collate, away, probe)
        except (ModelError, RuntimeError, ValueError):
            return one_by_one
        return (
            by_layer if agree(quick, one_by_one(objective, collate, away, probe), objective.tolerance) else one_by_one
        )


def agree(found: Gradients, expected: Gradients, tolerance: float) -> bool:
    """Whether every tensor differs by at most `tolerance` of its norm.

    To a tensor's norm a thousandth of the norm of all together is added: a gradient that is zero by the model's symmetry (an
    attention's key bias) is nothing but rounding on either path.
    """
    if any(found[name].shape != expected[name].shape for name in expected):
        return False
    norms = {name: float(torch.linalg.vector_norm(gradient)) for name, gradient in expected.items()}
    floor = 1e-3 * float(np.linalg.norm(list(norms.values())))
    return all(
        float(torch.linalg.vector_norm(found[name] - expected[name])) <= tolerance * (norms[name] + floor)
        for name in expected
    )


def probe_of(examples: Sequence[Any], collate: Collate) -> list[Any]:
    """Up to three examples, of different lengths where there are any: equal ones hide a loss that is averaged over tokens.

    Where all are of one length, the first loses half its tokens, if `collate` takes that.
    """
    some = sorted((examples[i] for i in range(min(len(examples), _LOOKED_AT))), key=length)
    probe = [some[0], some[len(some) // 2], some[-1]] if len(some) > 2 else some
    if not 1 < length(probe[0]) == length(probe[-1]):
        return probe
    varied = [_halved(probe[0]), *probe[1:]]
    try:
        collate(varied)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, SecureFedError):
        return probe
    return varied


def length(item: Any) -> int:
    """How many tokens of an example count; 0 where that is not known."""
    if not isinstance(item, Mapping) or "input_ids" not in item:
        return 0
    return int(np.sum(np.asarray(item["attention_mask"]))) if "attention_mask" in item else len(item["input_ids"])


def _halved(item: Mapping[str, Any]) -> dict[str, Any]:
    tokens = len(item["input_ids"])
    per_token = {name for name, value in item.items() if np.ndim(value) == 1 and len(value) == tokens}
    return {name: value[: tokens // 2] if name in per_token else value for name, value in item.items()}


def _moved_away(placed: Placed) -> Placed:
    generator = torch.Generator().manual_seed(0)
    return replace(
        placed,
        moving={
            name: (tensor.detach() + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor)).requires_grad_()
            for name, tensor in placed.moving.items()
        },
    )


def _require_uncoupled(objective: Objective, collate: Collate, placed: Placed, probe: Sequence[Any]) -> None:
    with torch.no_grad():
        together = losses(objective, collate, placed, probe)
        alone = torch.cat([losses(objective, collate, placed, [item]) for item in probe])
    if float((together - alone).abs().max()) > objective.tolerance * float(alone.abs().max()):
        raise ModelError(
            "the loss of an example depends on the others in its batch (it is averaged over all tokens of the batch, compares "
            "examples, or padding counts), so no example can be protected; give a loss that is each example's own, shape (B,)"
        )
    if changed := objective.changed_buffers():
        raise ModelError(
            f"buffer {changed[0]} of the model changes as it runs, so it may keep statistics of the examples, which no noise "
            "covers; give a model without such buffers"
        )


@contextmanager
def still(objective: Objective, once: Callable[[], Tensor]) -> Iterator[bool]:
    """In training mode without dropout; in evaluation mode, and said to draw, if it draws random numbers in another way."""
    objective.begin()
    try:
        with seeded(objective.device, np.random.default_rng(0)), _WithoutDropout():
            drawn = torch.get_rng_state()
            first, second = (
                once().detach(),
                once().detach(),
            )  # with gradients, since a model may draw for training alone
            draws = not torch.equal(first, second) or not torch.equal(torch.get_rng_state(), drawn)
            if draws:
                objective.eval()
            yield draws
    finally:
        objective.begin()


class _WithoutDropout(TorchFunctionMode):
    """Dropout passes on what it is given."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is functional.dropout:
            return args[0] if args else kwargs["input"]
        if func is functional.scaled_dot_product_attention and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


_LOOKED_AT = 64
