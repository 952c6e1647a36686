"""Prefix tuning, against PEFT and against the keys and values of a prompt in a decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import PrefixTuningConfig, get_peft_model
from torch import Tensor

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.virtual_tokens import Keys, Prefix, PromptTokens
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.adapters.virtual import base_of, for_task, made, texts

SUPPORTED = ("bert", "roberta", "llama", "gpt2")
KEYS = {"llama": Keys(2, 2, 4)}  # four heads share two heads' keys
USUAL = Keys(2, 2, 8)


def prefixed(architecture: str, adapter: Prefix, seed: int = 0) -> tuple[Any, list[str], Tensor]:
    """A model with a prefix, the prefix's parameter names, and its keys and values (layers, 2, heads, p, d)."""
    model: Any = made(architecture)
    names = adapter.inject(model, small_models.head_of(model), seed)
    model.double()
    keys = KEYS.get(architecture, USUAL)
    rows = base_of(model).prefix(torch.arange(3)[None])[0].detach()
    return model, names, rows.view(3, keys.layers, 2, keys.heads, keys.head_dim).permute(1, 2, 3, 0, 4)


@every("adapter", [Prefix(3), Prefix(3, projected=True)])
@every("architecture", SUPPORTED)
def test_the_model_computes_what_it_does_under_peft(architecture: str, adapter: Prefix) -> None:
    model, _, _ = prefixed(architecture, adapter)
    width = KEYS.get(architecture, USUAL).width
    config = PrefixTuningConfig(
        task_type="SEQ_CLS", num_virtual_tokens=3, prefix_projection=adapter.projected, encoder_hidden_size=width
    )
    theirs: Any = get_peft_model(made(architecture), config)
    theirs.prompt_encoder["default"].load_state_dict(base_of(model).prefix.state_dict())
    with torch.no_grad():
        expected = theirs.double().eval()(**small_models.batch()).logits
    torch.testing.assert_close(small_models.logits(model), expected, rtol=1e-10, atol=1e-12)
    assert expected.std(0).min() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_what_a_prompt_leaves_behind_in_a_decoder_is_a_prefix(architecture: str) -> None:
    """A decoder's later tokens see virtual tokens through their keys and values alone."""
    prompted: Any = made(architecture)
    PromptTokens(3).inject(prompted, [], 0)
    model, _, _ = prefixed(architecture, Prefix(3))
    plain: Any = base_of(made(architecture))
    left = plain(inputs_embeds=base_of(prompted).prompt.embedding.weight[None].double(), use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in left.layers]  # (2, heads, p, d) each
    rows = torch.stack(layers).permute(3, 0, 1, 2, 4).flatten(1)
    base_of(model).prefix.embedding.weight.copy_(rows)
    expected = small_models.logits(prompted.double())
    torch.testing.assert_close(small_models.logits(model), expected, rtol=1e-9, atol=1e-10)
    assert (expected - small_models.logits(made(architecture))).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("architecture", SUPPORTED)
def test_padding_and_batch_mates_do_not_matter(architecture: str) -> None:
    model, _, _ = prefixed(architecture, Prefix(3))
    alone = torch.cat([model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for ids in texts()])
    torch.testing.assert_close(small_models.logits(model), alone, rtol=1e-9, atol=1e-10)
    without_mask = torch.cat([model(input_ids=ids).logits for ids in texts()])
    torch.testing.assert_close(without_mask, alone, rtol=1e-9, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "task"),
    [("bert", "tokens"), ("bert", "answers"), ("roberta", "tokens"), ("llama", "words"), ("gpt2", "tokens")],
)
def test_the_text_keeps_its_length(architecture: str, task: str) -> None:
    model: Any = for_task(architecture, task)
    before = model(**small_models.batch())
    Prefix(3).inject(model, [], 0)
    after = model.double()(**small_models.batch())
    found = after.start_logits if task == "answers" else after.logits
    assert found.shape[:2] == (4, 9)
    assert (found - (before.start_logits if task == "answers" else before.logits)).abs().max() > 1e-3


@torch.no_grad()
def test_positions_given_by_the_caller_count_from_behind_the_prefix() -> None:
    model, _, _ = prefixed("llama", Prefix(3))
    ids = texts()[0]
    given = model(input_ids=ids, position_ids=torch.arange(9)[None]).logits
    torch.testing.assert_close(given, model(input_ids=ids).logits)
    embedded = model.model.embed_tokens(ids)
    torch.testing.assert_close(model.model(inputs_embeds=embedded)[0], model.model(input_ids=ids)[0])


@pytest.mark.parametrize("architecture", ["distilbert", "deberta", "deberta_v3"])
def test_models_without_a_cache_are_refused(architecture: str) -> None:
    model = small_models.make(architecture)
    with refused(MethodError):
        Prefix(3).inject(model, [], 0)
    assert not any("prefix" in name for name, _ in model.named_parameters())


def test_a_prefix_that_leaves_no_room_is_refused() -> None:
    with refused(MethodError):
        Prefix(16).inject(small_models.make("bert"), [], 0)
    model: Any = small_models.make("bert")
    Prefix(5).inject(model, [], 0)
    with refused(MethodError):
        model(input_ids=torch.ones(1, 12, dtype=torch.long))
