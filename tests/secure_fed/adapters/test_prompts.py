"""Virtual tokens in front of the text and prefixes of keys and values, against PEFT and against models without hooks."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from peft import PeftConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import nn

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.virtual_tokens import EncodedPromptTokens, Prefix, PromptTokens
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.adapters.virtual import base_of, for_task, lively, made, texts

DECODERS = ("llama", "gpt2")
WITH_CACHE = ("bert", "roberta", "llama", "gpt2")  # the architectures that can have a prefix
PROMPTS = (PromptTokens(3), EncodedPromptTokens(3), EncodedPromptTokens(3, network="LSTM"))
PREFIXES = (Prefix(3), Prefix(3, projected=True))


def adapted(architecture: str, adapter: Any) -> Any:
    model: Any = made(architecture)
    adapter.inject(model, small_models.head_of(model), 0)
    return model.double()


def rows_of(model: Any) -> torch.Tensor:
    """The embeddings (p, H) of a model's prompt."""
    rows: torch.Tensor = base_of(model).prompt(torch.arange(3)[None])[0].detach()
    return rows


@every(
    ("architecture", "adapter"),
    [
        *itertools.product(["bert", "roberta", "deberta", "deberta_v3"], PROMPTS),
        *itertools.product(WITH_CACHE, PREFIXES),
    ],
)
def test_models_compute_what_they_do_under_peft(architecture: str, adapter: Any) -> None:
    model = adapted(architecture, adapter)
    theirs = under_peft(architecture, adapter, base_of(model))
    with torch.no_grad():
        expected = theirs(**small_models.batch()).logits
    torch.testing.assert_close(small_models.logits(model), expected, rtol=1e-10, atol=1e-12)
    assert expected.std(0).min() > 1e-3


def under_peft(architecture: str, adapter: Any, base: Any) -> nn.Module:
    """PEFT's own wrapper around the same model, with the same prompt or prefix."""
    config: PeftConfig
    usual: dict[str, Any] = {"task_type": "SEQ_CLS", "num_virtual_tokens": adapter.length}
    if isinstance(adapter, PromptTokens):
        config = PromptTuningConfig(**usual)
    elif isinstance(adapter, EncodedPromptTokens):
        config = PromptEncoderConfig(**usual, encoder_reparameterization_type=adapter.network)
    else:  # four of Llama's heads share two heads' keys
        width = 8 if architecture == "llama" else 16
        config = PrefixTuningConfig(**usual, prefix_projection=adapter.projected, encoder_hidden_size=width)
    wrapped: Any = get_peft_model(made(architecture), config)
    own = base.prefix if isinstance(adapter, Prefix) else base.prompt
    wrapped.prompt_encoder["default"].load_state_dict(own.state_dict())
    done: nn.Module = wrapped.double().eval()
    return done


@torch.no_grad()
@pytest.mark.parametrize("architecture", DECODERS)
def test_decoders_classify_by_the_last_token_of_the_text(architecture: str) -> None:
    """Each text runs alone, with the prompt concatenated by hand, through a model without hooks."""
    model = adapted(architecture, PromptTokens(3))
    plain: Any = made(architecture)
    prompt, expected = rows_of(model), []
    for ids in texts():
        embedded = torch.cat([prompt[None], base_of(plain).get_input_embeddings()(ids)], 1)
        expected.append(plain.score(base_of(plain)(inputs_embeds=embedded).last_hidden_state[0, -1]))
    torch.testing.assert_close(small_models.logits(model), torch.stack(expected), rtol=1e-10, atol=1e-12)


@torch.no_grad()
@every(
    ("architecture", "adapter"),
    [*((name, PromptTokens(3)) for name in small_models.ARCHITECTURES), *((name, Prefix(3)) for name in WITH_CACHE)],
)
def test_padding_and_batch_mates_do_not_matter(architecture: str, adapter: Any) -> None:
    model = adapted(architecture, adapter)
    alone = torch.cat([model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for ids in texts()])
    torch.testing.assert_close(small_models.logits(model), alone, rtol=1e-9, atol=1e-10)
    without_mask = torch.cat([model(input_ids=ids).logits for ids in texts()])
    torch.testing.assert_close(without_mask, alone, rtol=1e-9, atol=1e-10)


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "task"),
    [(a, t) for a in ("bert", "roberta", "distilbert", "deberta_v3") for t in ("tokens", "answers")]
    + [(a, t) for a in DECODERS for t in ("tokens", "words")],
)
def test_other_heads_see_the_text_alone(architecture: str, task: str) -> None:
    """Outputs have the text's length, and equal the base model's outputs for the text behind a prompt."""
    model: Any = for_task(architecture, task)
    plain = copy.deepcopy(model)
    PromptTokens(3).inject(model, [], 0)
    model.double()
    batch = small_models.batch()
    out = model(**batch)
    found = out.start_logits if task == "answers" else out.logits
    assert found.shape[:2] == (4, 9)
    words = base_of(plain).get_input_embeddings()
    prompt = base_of(model).prompt(torch.arange(3)[None]).expand(4, -1, -1)
    mask = torch.cat([torch.ones(4, 3, dtype=torch.long), batch["attention_mask"]], 1)
    by_hand = plain(inputs_embeds=torch.cat([prompt, words(batch["input_ids"])], 1), attention_mask=mask)
    expected = by_hand.start_logits if task == "answers" else by_hand.logits
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(found[real], expected[:, 3:][real], rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_hidden_states_and_tuples_have_the_texts_length_too() -> None:
    model: Any = for_task("bert", "tokens")
    PromptTokens(3).inject(model, [], 0)
    model.double()
    out = model(**small_models.batch(), output_hidden_states=True)
    assert [layer.shape[1] for layer in out.hidden_states] == [9, 9, 9]
    as_tuple = model.bert(small_models.batch()["input_ids"], return_dict=False)
    assert as_tuple[0].shape == (4, 9, 16)


@torch.no_grad()
def test_token_types_and_positions_given_by_the_caller() -> None:
    model = adapted("bert", PromptTokens(3))
    plain: Any = made("bert")
    ids = texts()[0]
    types = (torch.arange(9) > 4).long()[None]
    found = model(input_ids=ids, token_type_ids=types, position_ids=torch.arange(9)[None]).logits
    embedded = torch.cat([rows_of(model)[None], plain.bert.embeddings.word_embeddings(ids)], 1)
    expected = plain(inputs_embeds=embedded, token_type_ids=torch.cat([torch.zeros(1, 3, dtype=torch.long), types], 1))
    torch.testing.assert_close(found, expected.logits, rtol=1e-10, atol=1e-12)
    given = plain.bert.embeddings.word_embeddings(ids)
    again = model(inputs_embeds=given, token_type_ids=types).logits
    torch.testing.assert_close(again, expected.logits, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_roberta_counts_positions_from_where_the_text_does() -> None:
    model = adapted("roberta", PromptTokens(3))
    ids = texts()[0]
    first = model.config.pad_token_id + 1
    places = torch.arange(first, first + 9)[None]
    torch.testing.assert_close(model(input_ids=ids, position_ids=places).logits, model(input_ids=ids).logits)


def test_a_prompt_starts_as_words_of_the_vocabulary() -> None:
    model = adapted("bert", PromptTokens(3))
    words = model.bert.embeddings.word_embeddings.weight
    assert all((words == row.double()).all(1).any() for row in rows_of(model))
    assert model.bert.prompt.embedding.weight.data_ptr() != words.data_ptr()


# Refusals.


def test_no_positions_left() -> None:
    """The first of RoBERTa's 20 positions is padding's. A model not made from settings has texts of any length."""
    for architecture, adapter in (
        ("bert", PromptTokens(16)),
        ("roberta", PromptTokens(19)),
        ("bert", PromptTokens(3, max_length=14)),
        ("bert", Prefix(16)),
    ):
        with refused(MethodError):
            adapter.inject(small_models.make(architecture), [], 0)
    for longest in (13, 128):
        PromptTokens(3, max_length=longest).inject(small_models.make("bert"), [], 0)


@pytest.mark.parametrize(
    ("architecture", "adapter", "limit"),
    [
        *(("bert", kind(5), 16) for kind in (PromptTokens, Prefix)),
        ("roberta", PromptTokens(5), 19),
        ("gpt2", PromptTokens(5), 16),
    ],
    ids=["bert", "bert, prefix", "roberta", "gpt2"],
)
def test_a_text_that_is_too_long_is_named(architecture: str, adapter: Any, limit: int) -> None:
    model = small_models.make(architecture)
    adapter.inject(model, [], 0)
    model(input_ids=torch.ones(1, limit - 5, dtype=torch.long))
    with refused(MethodError):
        model(input_ids=torch.ones(1, limit - 4, dtype=torch.long))


def test_a_model_of_two_stacks() -> None:
    from transformers import BartConfig, BartForSequenceClassification

    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 40, "pad_token_id": 0}
    model = BartForSequenceClassification(BartConfig(**shape, **sizes, max_position_embeddings=32))
    with refused(MethodError):
        PromptTokens(3).inject(model, [], 0)


def test_the_rest_of_a_text_and_masks_of_more_dimensions() -> None:
    model: Any = for_task("llama", "words")
    PromptTokens(3).inject(model, [], 0)
    model.double()
    ids = texts()[0]
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with refused(MethodError):
        model(input_ids=ids[:, :1], past_key_values=cache)
    with refused(MethodError):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 9, 9))


def test_text_is_written_behind_a_prompt() -> None:
    """Greedy generation by transformers' loop, against a full forward pass for each token."""
    model: Any = lively(for_task("gpt2", "words"))
    PromptTokens(3).inject(model, [], 0)
    model.double()
    ids = texts()[2]
    written = model.generate(ids, max_new_tokens=3, do_sample=False, use_cache=False, pad_token_id=0, eos_token_id=None)
    expected = ids
    with torch.no_grad():
        for _ in range(3):
            expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, expected)


# Prefixes.


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_what_a_prompt_leaves_behind_in_a_decoder_is_a_prefix(architecture: str) -> None:
    """A decoder's later tokens see virtual tokens through their keys and values alone."""
    prompted: Any = made(architecture)
    PromptTokens(3).inject(prompted, [], 0)
    model = adapted(architecture, Prefix(3))
    plain: Any = base_of(made(architecture))
    left = plain(inputs_embeds=base_of(prompted).prompt.embedding.weight[None].double(), use_cache=True).past_key_values
    layers = [torch.stack([layer.keys[0], layer.values[0]]) for layer in left.layers]  # (2, heads, p, d) each
    rows = torch.stack(layers).permute(3, 0, 1, 2, 4).flatten(1)
    base_of(model).prefix.embedding.weight.copy_(rows)
    expected = small_models.logits(prompted.double())
    torch.testing.assert_close(small_models.logits(model), expected, rtol=1e-9, atol=1e-10)
    assert (expected - small_models.logits(made(architecture))).abs().max() > 1e-3


@torch.no_grad()
@pytest.mark.parametrize(
    ("architecture", "task"),
    [("bert", "tokens"), ("bert", "answers"), ("roberta", "tokens"), ("llama", "words"), ("gpt2", "tokens")],
)
def test_behind_a_prefix_the_text_keeps_its_length(architecture: str, task: str) -> None:
    model: Any = for_task(architecture, task)
    before = model(**small_models.batch())
    Prefix(3).inject(model, [], 0)
    after = model.double()(**small_models.batch())
    found = after.start_logits if task == "answers" else after.logits
    assert found.shape[:2] == (4, 9)
    assert (found - (before.start_logits if task == "answers" else before.logits)).abs().max() > 1e-3


@torch.no_grad()
def test_positions_given_by_the_caller_count_from_behind_the_prefix() -> None:
    model = adapted("llama", Prefix(3))
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
