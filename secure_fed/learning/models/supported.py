"""Models that example-level privacy refuses because of their layers.

A guarantee needs two properties that a model can break: an example's loss depends on that example alone, and the computed
per-example gradient is its gradient. `require_supported` refuses violations that the model's layers show, and
`couples_examples` recognises models that compute one example at a time; trials find the rest (`training/trial.py`,
`comparison.py`). An `Objective` has no layers with running statistics.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from torch import nn

from secure_fed.errors import MethodError, ModelError
from secure_fed.learning.models.quantised import couples_rows

# PEFT's initialisations that read data: activations (EVA, CorDA), or gradients (LoRA-GA).
_DATA_DRIVEN = ("eva", "corda", "lora_ga", "loraga")


def require_data_free_start(model: nn.Module) -> None:
    """Refuse what reveals data without noise for any unit: adapters that PEFT initialised from it, and `max_norm`."""
    _refuse_largest_norms(model)
    configs = getattr(model, "peft_config", None)
    for config in configs.values() if isinstance(configs, Mapping) else ():
        start = getattr(config, "init_lora_weights", None)
        if isinstance(start, str) and start.lower() in _DATA_DRIVEN:
            raise MethodError(
                f"the model's adapters were started by {start!r}, which reads the data, so the start itself would leak them; "
                "use a start without data, or set privacy.unit to none"
            )


def _refuse_largest_norms(model: nn.Module) -> None:
    """Refuse embeddings that shorten, in place, the rows of a batch's tokens: the rows show which tokens occur."""
    for name, module in model.named_modules():
        most = module.max_norm if isinstance(module, nn.Embedding | nn.EmbeddingBag) else None
        if most is not None:
            raise ModelError(
                f"layer {name or type(model).__name__} of the model is {type(module).__name__} with max_norm = {most:g}, which "
                "shortens the rows of a batch's tokens whenever it runs, without noise; set max_norm = None"
            )


def require_supported(model: nn.Module, trainable: Collection[str]) -> None:
    """Refuse, by name, layers and parameters without proven per-example gradients."""
    require_data_free_start(model)
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


def couples_examples(model: nn.Module) -> bool:
    """Whether examples of a batch are known to move each other's numbers: by experts, or by outliers in 8 bits.

    A batch of one example couples nothing.
    """
    return mixes_experts(model) or couples_rows(model)


def mixes_experts(model: nn.Module) -> bool:
    """Whether a layer routes tokens to experts, as far as class names tell.

    An expert processes the tokens of all examples of a batch together: with a capacity it drops tokens beyond it, and without a
    capacity its rounding depends on the number of tokens of all examples. A batch of one example couples nothing.
    """
    return any(_EXPERTS.search(type(module).__name__) for module in model.modules())


_EXPERTS = re.compile(r"M[oO][eE](?![a-z])|Router(?![a-z])|Experts?(?![a-z])|SparseMLP")
