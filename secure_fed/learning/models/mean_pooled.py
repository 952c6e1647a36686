"""A text classifier whose head reads the mean over the tokens, which sentence encoders are trained for.

    scores = W m + b,    m = the mean of h_t over a text's tokens

with h_t the base model's last hidden states. The classifiers of transformers read the first token alone in most encoders, with
or without a layer before the scores.

transformers and PEFT load it like their own classes. A saved model has a copy of this file beside its weights, so that it can
be loaded without secure-fed, with `trust_remote_code=True`: hence this file imports nothing but torch and transformers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.utils.generic import can_return_tuple


class MeanPooledConfig(PreTrainedConfig):
    """text_config: the base model's configuration. The rest, such as the names of classes, is as in every configuration."""

    model_type = "mean_pooled"
    sub_configs = {"text_config": AutoConfig}  # noqa: RUF012  # as transformers declares it

    def __init__(self, text_config: PreTrainedConfig | dict[str, Any] | None = None, **settings: Any) -> None:
        if isinstance(text_config, dict):
            text_config = AutoConfig.for_model(**text_config)
        self.text_config = text_config or BertConfig()
        super().__init__(**settings)
        self.classifier_pooling = "mean"  # as ModernBERT's configuration calls it


class MeanPooledForSequenceClassification(PreTrainedModel):
    """The classifier: `encoder`, the base model without a pooler of its own, and `classifier`, a linear layer."""

    config_class = MeanPooledConfig
    base_model_prefix = "encoder"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True

    def __init__(self, config: MeanPooledConfig, encoder: nn.Module | None = None) -> None:
        super().__init__(config)
        dtype = torch.get_default_dtype()  # the head's dtype, whatever the base model's was
        self.encoder: Any = AutoModel.from_config(config.text_config, dtype=dtype) if encoder is None else encoder
        if getattr(self.encoder, "pooler", None) is not None:
            self.encoder.pooler = None  # nothing reads it
        self.classifier = nn.Linear(config.text_config.get_text_config().hidden_size, len(config.id2label or ()))
        nn.init.normal_(self.classifier.weight, std=0.02)
        nn.init.zeros_(self.classifier.bias)
        self.post_init()  # type: ignore[no-untyped-call]

    @classmethod
    def from_pretrained(  # type: ignore[override]  # a pair, if asked for
        cls, name: Any, *rest: Any, config: Any = None, output_loading_info: bool = False, **settings: Any
    ) -> Any:
        """The classifier in a folder or on the Hub; for another model, a new head on its base model.

        settings: as for every `from_pretrained`, for instance `id2label`. With output_loading_info a pair: the classifier, and
        its missing and unexpected weights, by its own names.
        """
        hub = {key: value for key, value in settings.items() if key in _HUB}
        base = config if config is not None else AutoConfig.from_pretrained(name, **hub)
        if isinstance(base, MeanPooledConfig):
            return super().from_pretrained(
                name, *rest, config=config, output_loading_info=output_loading_info, **settings
            )
        if base.is_encoder_decoder:
            raise ValueError("it has an encoder and a decoder, and the mean over tokens is of models of one stack")
        settings.pop("ignore_mismatched_sizes", None)  # the head is new whatever its size
        model, info = cls._on_base(name, base, settings | ({} if config is None else {"config": config}))
        return (model, info) if output_loading_info else model

    @classmethod
    def _on_base(cls, name: Any, base: PreTrainedConfig, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """A new head on a base model, and its loading info. settings: for the head's configuration, the base, or both."""
        told: dict[str, Any] = {"text_config": base}
        if not settings.keys() & {"num_labels", "id2label"}:
            told |= {"id2label": base.id2label, "label2id": base.label2id}
        own, others = MeanPooledConfig.from_dict(told, return_unused_kwargs=True, **settings)
        both = {key: settings[key] for key in ("attn_implementation", "dtype") if key in settings}
        encoder, info = AutoModel.from_pretrained(name, output_loading_info=True, **others | both)
        own.text_config, own.name_or_path = encoder.config, str(name)
        encoder.config.name_or_path = ""  # which would be saved
        model: Any = cls(own, encoder)
        hook = getattr(encoder, "_hf_hook", None)  # accelerate's, of an encoder whose weights are elsewhere
        place = hook.execution_device if hook is not None and encoder.device.type == "meta" else encoder.device
        model.classifier.to(device=place, dtype=encoder.dtype)
        model.eval()
        there = {known for known, _ in model.named_parameters()}
        info["missing_keys"] = {f"encoder.{key}" for key in info["missing_keys"]} & there
        return model, info

    def get_input_embeddings(self) -> nn.Module:
        found: nn.Module = self.encoder.get_input_embeddings()
        return found

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.encoder.set_input_embeddings(value)

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        **others: Any,
    ) -> SequenceClassifierOutput:
        """Scores (B, classes) of texts (B, T), and the loss where labels are given."""
        named = {"token_type_ids": token_type_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
        others |= {key: value for key, value in named.items() if value is not None}  # not every base model takes each
        mean, found = self.read(input_ids=input_ids, attention_mask=attention_mask, **others)
        logits = self.classifier(mean)
        loss = None if labels is None else self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        seen = {name: found.get(name) for name in ("hidden_states", "attentions")}
        return SequenceClassifierOutput(loss=loss, logits=logits, **seen)

    def read(self, **inputs: Any) -> tuple[Tensor, Any]:
        """(B, d) the mean over each text's tokens, and all outputs of the base model."""
        found = self.encoder(**inputs)
        return pooled(found.last_hidden_state, inputs["attention_mask"]), found


def pooled(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """(B, d): the mean of `hidden` (B, T, d) over the tokens that the mask (B, T) keeps."""
    if mask is None:
        return hidden.mean(1)
    counted = mask.to(hidden.dtype).unsqueeze(-1)
    return (hidden * counted).sum(1) / counted.sum(1).clamp(min=1)


_HUB = ("revision", "trust_remote_code", "token", "cache_dir", "local_files_only", "force_download", "subfolder")

AutoConfig.register(MeanPooledConfig.model_type, MeanPooledConfig, exist_ok=True)
AutoModelForSequenceClassification.register(MeanPooledConfig, MeanPooledForSequenceClassification, exist_ok=True)
MeanPooledConfig.register_for_auto_class()  # type: ignore[no-untyped-call]
MeanPooledForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")  # type: ignore[no-untyped-call]
