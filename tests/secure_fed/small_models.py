"""Small random classifiers of every architecture that the tests name, made in milliseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DebertaConfig,
    DebertaForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPTNeoConfig,
    GPTNeoForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

VOCABULARY, LABELS = 40, 3
_COMMON: dict[str, Any] = {"vocab_size": VOCABULARY, "num_labels": LABELS, "pad_token_id": 0}


def bert() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return BertForSequenceClassification(BertConfig(**_COMMON, **shape, max_position_embeddings=16))


def roberta() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return RobertaForSequenceClassification(RobertaConfig(**_COMMON, **shape, max_position_embeddings=20))


def distilbert() -> nn.Module:
    return DistilBertForSequenceClassification(
        DistilBertConfig(**_COMMON, dim=16, n_layers=2, n_heads=2, hidden_dim=24, max_position_embeddings=16)
    )


def deberta() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    attention = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 8}
    return DebertaForSequenceClassification(
        DebertaConfig(**_COMMON, **shape, **attention, max_position_embeddings=16, pooler_hidden_size=16)
    )


def deberta_v3() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    attention = {
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "share_att_key": True,
    }
    more = {
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
        "type_vocab_size": 0,
        "pooler_hidden_size": 16,
    }
    return DebertaV2ForSequenceClassification(
        DebertaV2Config(**_COMMON, **shape, **attention, **more, max_position_embeddings=16)
    )


def llama() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
    return LlamaForSequenceClassification(LlamaConfig(**_COMMON, **shape, num_key_value_heads=2))


def gpt2() -> nn.Module:
    return GPT2ForSequenceClassification(GPT2Config(**_COMMON, n_embd=16, n_layer=2, n_head=2, n_positions=16))


ARCHITECTURES: dict[str, Callable[[], nn.Module]] = {
    "bert": bert,
    "roberta": roberta,
    "distilbert": distilbert,
    "deberta": deberta,
    "deberta_v3": deberta_v3,
    "llama": llama,
    "gpt2": gpt2,
}


def mpnet() -> nn.Module:
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    return MPNetForSequenceClassification(MPNetConfig(**_COMMON, **shape, max_position_embeddings=20))


def gpt_neo() -> nn.Module:
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
    kinds = {"attention_types": [[["global", "local"], 1]], "window_size": 4, "bos_token_id": 1, "eos_token_id": 1}
    return GPTNeoForSequenceClassification(GPTNeoConfig(**_COMMON, **shape, **kinds, max_position_embeddings=16))


# Further architectures whose blocks are known.
PLACED: dict[str, Callable[[], nn.Module]] = {**ARCHITECTURES, "mpnet": mpnet, "gpt_neo": gpt_neo}


def make(architecture: str, seed: int = 0) -> nn.Module:
    """The classifier in evaluation mode, without dropout; equal seeds give equal weights."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    return PLACED[architecture]().eval()


def head_of(model: nn.Module) -> list[str]:
    """The parameters of a classifier outside its base model, and BERT's pooler, which masked language models leave out."""
    base = f"{getattr(model, 'base_model_prefix', '')}."
    return [name for name, _ in model.named_parameters() if not name.startswith(base) or ".pooler." in name]


def batch() -> dict[str, torch.Tensor]:
    """Four texts, the last two padded."""
    ids = torch.randint(2, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(5))
    ids[2:, 6:] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    out: torch.Tensor = model.eval()(**batch()).logits
    return out
