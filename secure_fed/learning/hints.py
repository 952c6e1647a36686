"""Warnings about texts and model, shown before training starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import nn

from secure_fed.config import RunConfig
from secure_fed.learning import tasks
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.on_disk import in_parts
from secure_fed.learning.models.architecture import means_tokens, reads_the_mean
from secure_fed.learning.tasks.chat_template import ChatTemplate
from secure_fed.learning.tasks.item_extras import ASIDE

_MANY_UNKNOWN, _MANY_CUT = 0.2, 0.02


def _share(encoded: Encoded, token: int) -> float:
    """The share of all tokens that are this one."""
    found = sum(int((np.concatenate(part) == token).sum()) for part in in_parts(encoded.input_ids))
    return found / int(encoded.lengths.sum())


def _of_chats(encoded: Encoded, which: str, most: int) -> Iterator[str]:
    """Conversations that lose turns, and those that are left out."""
    left = int((encoded.lengths == 0).sum())
    if cut := sum(map(bool, encoded.columns[ASIDE])) - left:
        yield f"{cut:,} of {len(encoded):,} {which} conversations lose their oldest turns to model.max_length = {most}"
    if left:
        yield (
            f"{left:,} of {len(encoded):,} {which} conversations are left out, since not even their last exchange fits "
            f"model.max_length = {most}; raise it if they matter"
        )


def warnings(config: RunConfig, read: Mapping[str, Encoded], tokenizer: Any, model: nn.Module) -> Iterator[str]:
    """Warnings if many tokens are unknown to the tokenizer, so that examples look alike, if many texts are cut, or if the head
    does not read the mean over tokens, for which the model was made.

    read: the texts, by what they are for; all count for conversations, and the first elsewhere. With privacy these are the test
    texts alone, which do not train: a share of private texts would be released without noise.
    """
    which, encoded = next(iter(read.items()))
    unknown, ends = tokenizer.unk_token_id, (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    share = 0.0 if unknown is None or unknown in ends else _share(encoded, unknown)  # GPT-2's is its end token
    if share >= _MANY_UNKNOWN:
        tokens_of = f"tokens are unknown to the tokenizer of {config.model.name}"
        yield f"{share:.0%} of the {which} {tokens_of}, and look alike to it; set model.name to another model"
    most = config.model.max_length
    if config.data.task == "chat":
        for kind, chats in read.items():
            yield from _of_chats(chats, kind, most)
        if not ChatTemplate.of(tokenizer).divides_by_tokens:
            yield (
                f"the chat template divides turns by plain text, for which the tokenizer of {config.model.name} has no tokens, "
                "so a text of the data can fake a turn: set data.chat_template to one with control tokens"
            )
    cut = float((encoded.lengths >= most).mean()) if config.data.task not in ("question_answering", "chat") else 0.0
    if cut >= _MANY_CUT:
        yield f"{cut:.0%} of the {which} texts reach model.max_length = {most} and are cut there; raise it if their ends matter"
    of_whole_texts = tasks.build(config.data).auto == "AutoModelForSequenceClassification"
    if of_whole_texts and not reads_the_mean(model) and means_tokens(config.model):
        made = "a sentence encoder, made for the mean over its tokens, and the head reads something else"
        yield f"{config.model.name} is {made}; set model.pooling = 'mean'"
