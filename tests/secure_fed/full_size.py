"""The models of the papers at their full sizes, from configurations alone: make them on the device "meta"."""

from __future__ import annotations

from torch import nn
from transformers import (
    DebertaConfig,
    DebertaForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

NEWS_20 = 20  # classes of 20Newsgroup; GLUE tasks have two or three, a difference too small for the printed digits


ROBERTA = {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1, "pad_token_id": 1}


def roberta_base() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**ROBERTA, num_labels=NEWS_20))


def roberta_base_glue() -> nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**ROBERTA, num_labels=2))


def roberta_large() -> nn.Module:
    shape = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return RobertaForSequenceClassification(RobertaConfig(**ROBERTA, **shape, num_labels=2))


def deberta_base() -> nn.Module:
    relative = {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_biased_input": False}
    return DebertaForSequenceClassification(
        DebertaConfig(vocab_size=50265, type_vocab_size=0, pooler_hidden_size=768, num_labels=2, **relative)
    )


def deberta_v3_base() -> nn.Module:
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    shared = {"share_att_key": True, "position_buckets": 256, "norm_rel_ebd": "layer_norm"}
    shape = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    sizes = {"vocab_size": 128100, "type_vocab_size": 0, "pooler_hidden_size": 768, "num_labels": NEWS_20}
    return DebertaV2ForSequenceClassification(DebertaV2Config(**shape, **sizes, **relative, **shared))


def distilbert() -> nn.Module:
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=30522, num_labels=NEWS_20))


def llama_7b() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig())  # transformers' default configuration is LLaMA-7B


def llama_13b() -> nn.Module:
    shape = {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "intermediate_size": 13824}
    return LlamaForCausalLM(LlamaConfig(**shape))
