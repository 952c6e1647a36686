"""Virtual tokens in front of the text, against PEFT and against models written out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import PromptEncoderConfig, PromptTuningConfig, get_peft_model
from torch import nn
from torch.func import functional_call

from secure_fed.errors import MethodError
from secure_fed.learning.models.adapters.virtual_tokens import EncodedPromptTokens, PromptTokens
from tests.cells import every
from tests.secure_fed import small_models
from tests.secure_fed.adapters import counts
from tests.secure_fed.adapters.virtual import base_of, bert_encoded, bert_logits, for_task, lively, made, texts

ENCODERS = ("bert", "roberta", "distilbert", "deberta", "deberta_v3")
DECODERS = ("llama", "gpt2")
ADAPTERS = (PromptTokens(3), EncodedPromptTokens(3), EncodedPromptTokens(3, network="LSTM"))


def prompted(
    architecture: str, adapter: PromptTokens | EncodedPromptTokens, seed: int = 0
) -> tuple[Any, list[str], torch.Tensor]:
    """A model with a prompt, the prompt's parameter names, and its embeddings (p, H)."""
    model: Any = made(architecture)
    names = adapter.inject(model, small_models.head_of(model), seed)
    model.double()
    return model, names, base_of(model).prompt(torch.arange(3)[None])[0].detach()


@every("adapter", ADAPTERS)
@every("architecture", small_models.ARCHITECTURES)
def test_count_and_names(architecture: str, adapter: PromptTokens | EncodedPromptTokens) -> None:
    model = small_models.make(architecture)
    kept, head = [name for name, _ in model.named_parameters()], small_models.head_of(model)
    names = adapter.inject(model, head, 0)
    assert sum(model.get_parameter(name).numel() for name in names) == counts.prompt(adapter, 16)
    assert [name for name, _ in model.named_parameters() if name not in names] == kept
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {*names, *head}
    assert all(".prompt." in name for name in names)


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("architecture", ["bert", "roberta", "deberta", "deberta_v3"])
def test_encoders_compute_what_they_do_under_peft(
    architecture: str, adapter: PromptTokens | EncodedPromptTokens
) -> None:
    model, _, _ = prompted(architecture, adapter)
    theirs = under_peft(architecture, adapter, base_of(model).prompt)
    with torch.no_grad():
        expected = theirs(**small_models.batch()).logits
    torch.testing.assert_close(small_models.logits(model), expected, rtol=1e-10, atol=1e-12)
    assert expected.std(0).min() > 1e-3


@pytest.mark.parametrize("architecture", DECODERS)
def test_decoders_differ_from_peft_where_there_is_padding(architecture: str) -> None:
    """PEFT classifies by the batch's last position, where the two shorter texts have padding."""
    model, _, _ = prompted(architecture, PromptTokens(3))
    with torch.no_grad():
        expected = under_peft(architecture, PromptTokens(3), base_of(model).prompt)(**small_models.batch()).logits
    found = small_models.logits(model)
    torch.testing.assert_close(found[:2], expected[:2], rtol=1e-10, atol=1e-12)
    assert (found - expected)[2:].abs().max(1).values.min() > 1e-3


def under_peft(architecture: str, adapter: PromptTokens | EncodedPromptTokens, prompt: nn.Module) -> nn.Module:
    """PEFT's own wrapper around the same model, with the same prompt."""
    config: PromptTuningConfig | PromptEncoderConfig
    if isinstance(adapter, PromptTokens):
        config = PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=adapter.length)
    else:
        config = PromptEncoderConfig(
            task_type="SEQ_CLS", num_virtual_tokens=adapter.length, encoder_reparameterization_type=adapter.network
        )
    wrapped: Any = get_peft_model(made(architecture), config)
    wrapped.prompt_encoder["default"].load_state_dict(prompt.state_dict())
    done: nn.Module = wrapped.double().eval()
    return done


@torch.no_grad()
def test_bert_written_out() -> None:
    model, _, prompt = prompted("bert", PromptTokens(3))
    words = model.bert.embeddings.word_embeddings.weight
    expected = [bert_logits(model, bert_encoded(model.bert, torch.cat([prompt, words[ids[0]]]))) for ids in texts()]
    torch.testing.assert_close(small_models.logits(model), torch.stack(expected), rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("architecture", DECODERS)
def test_decoders_classify_by_the_last_token_of_the_text(architecture: str) -> None:
    """Each text runs alone, with the prompt concatenated by hand, through a model without hooks."""
    model, _, prompt = prompted(architecture, PromptTokens(3))
    plain: Any = made(architecture)
    expected = []
    for ids in texts():
        embedded = torch.cat([prompt[None], base_of(plain).get_input_embeddings()(ids)], 1)
        expected.append(plain.score(base_of(plain)(inputs_embeds=embedded).last_hidden_state[0, -1]))
    torch.testing.assert_close(small_models.logits(model), torch.stack(expected), rtol=1e-10, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("architecture", small_models.ARCHITECTURES)
def test_padding_and_batch_mates_do_not_matter(architecture: str) -> None:
    model, _, _ = prompted(architecture, PromptTokens(3))
    alone = torch.cat([model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits for ids in texts()])
    torch.testing.assert_close(small_models.logits(model), alone, rtol=1e-9, atol=1e-10)


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
    model, _, prompt = prompted("bert", PromptTokens(3))
    plain: Any = made("bert")
    ids = texts()[0]
    types = (torch.arange(9) > 4).long()[None]
    found = model(input_ids=ids, token_type_ids=types, position_ids=torch.arange(9)[None]).logits
    embedded = torch.cat([prompt[None], plain.bert.embeddings.word_embeddings(ids)], 1)
    expected = plain(inputs_embeds=embedded, token_type_ids=torch.cat([torch.zeros(1, 3, dtype=torch.long), types], 1))
    torch.testing.assert_close(found, expected.logits, rtol=1e-10, atol=1e-12)
    given = plain.bert.embeddings.word_embeddings(ids)
    again = model(inputs_embeds=given, token_type_ids=types).logits
    torch.testing.assert_close(again, expected.logits, rtol=1e-10, atol=1e-12)


@torch.no_grad()
def test_roberta_counts_positions_from_where_the_text_does() -> None:
    model, _, _ = prompted("roberta", PromptTokens(3))
    ids = texts()[0]
    first = model.config.pad_token_id + 1
    places = torch.arange(first, first + 9)[None]
    torch.testing.assert_close(model(input_ids=ids, position_ids=places).logits, model(input_ids=ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("architecture", ["bert", "llama"])
def test_copies_and_functional_calls_use_the_prompt_that_is_theirs(architecture: str) -> None:
    model, names, _ = prompted(architecture, PromptTokens(3))
    before, other = small_models.logits(model), copy.deepcopy(model)
    base_of(other).prompt.embedding.weight.mul_(-1)
    assert torch.equal(small_models.logits(model), before)
    assert (small_models.logits(other) - before).abs().max() > 1e-3
    given = {name: -model.get_parameter(name) for name in names}
    called: Any = functional_call(model, given, (), small_models.batch())
    assert torch.equal(called.logits, small_models.logits(other))


def test_a_prompt_starts_as_words_of_the_vocabulary() -> None:
    model, names, prompt = prompted("bert", PromptTokens(3))
    words = model.bert.embeddings.word_embeddings.weight
    assert all((words == row.double()).all(1).any() for row in prompt)
    assert model.get_parameter(names[0]).data_ptr() != words.data_ptr()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_start_is_a_function_of_the_seed(adapter: PromptTokens | EncodedPromptTokens) -> None:
    def start(seed: int) -> torch.Tensor:
        model = small_models.make("bert")
        names = adapter.inject(model, [], seed)
        assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
        return torch.cat([model.get_parameter(name).detach().flatten() for name in names])

    assert torch.equal(start(3), start(3))
    assert not torch.equal(start(3), start(4))
    model = small_models.make("bert")
    torch.rand(1)
    random_state = torch.random.get_rng_state()
    names = adapter.inject(model, [], 3)
    assert torch.equal(random_state, torch.random.get_rng_state())
    assert torch.equal(torch.cat([model.get_parameter(name).detach().flatten() for name in names]), start(3))


def test_a_model_in_bfloat16_has_a_prompt_in_float32() -> None:
    model = small_models.make("bert").bfloat16()
    names = PromptTokens(3).inject(model, [], 0)
    assert {model.get_parameter(name).dtype for name in names} == {torch.float32}
    assert small_models.logits(model).dtype == torch.bfloat16


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_a_model_without_numbers_is_counted(adapter: PromptTokens | EncodedPromptTokens) -> None:
    model = small_models.make("bert").to("meta")
    names = adapter.inject(model, [], 0)
    assert all(model.get_parameter(name).is_meta for name in names)
    assert sum(model.get_parameter(name).numel() for name in names) == counts.prompt(adapter, 16)


# Refusals.


def test_no_positions_left() -> None:
    with pytest.raises(MethodError, match=r"method.prompt_length = 16 .* BertModel has 16 positions; set .* below 16"):
        PromptTokens(16).inject(small_models.make("bert"), [], 0)
    with pytest.raises(MethodError, match=r"RobertaModel has 19 positions"):  # 20 positions, the first is padding's
        PromptTokens(19).inject(small_models.make("roberta"), [], 0)
    with pytest.raises(
        MethodError,
        match=r"model.max_length = 14 and method.prompt_length = 3 need 17 positions, and BertModel has 16: "
        r"set method.prompt_length to at most 2, or set model.max_length to at most 13",
    ):
        PromptTokens(3, max_length=14).inject(small_models.make("bert"), [], 0)
    PromptTokens(3, max_length=13).inject(small_models.make("bert"), [], 0)
    PromptTokens(3, max_length=128).inject(small_models.make("bert"), [], 0)  # a model not made from settings


@pytest.mark.parametrize(("architecture", "limit"), [("bert", 16), ("roberta", 19), ("gpt2", 16)])
def test_a_text_that_is_too_long_is_named(architecture: str, limit: int) -> None:
    model = small_models.make(architecture)
    PromptTokens(5).inject(model, [], 0)
    model(input_ids=torch.ones(1, limit - 5, dtype=torch.long))
    with pytest.raises(
        MethodError,
        match=rf"a text of {limit - 4} tokens and method.prompt_length = 5 need {limit + 1} positions.*at most {limit - 5}",
    ):
        model(input_ids=torch.ones(1, limit - 4, dtype=torch.long))


def test_models_that_cannot_take_a_prompt() -> None:
    with pytest.raises(MethodError, match=r"Sequential has no part that takes embedded tokens"):
        PromptTokens(3).inject(nn.Sequential(nn.Linear(2, 2)), [], 0)
    model = small_models.make("bert")
    PromptTokens(3).inject(model, [], 0)
    with pytest.raises(MethodError, match="already has virtual tokens"):
        EncodedPromptTokens(3).inject(model, [], 0)


def test_a_model_of_two_stacks() -> None:
    from transformers import BartConfig, BartForSequenceClassification

    shape = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes = {"d_model": 8, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8, "vocab_size": 40, "pad_token_id": 0}
    model = BartForSequenceClassification(BartConfig(**shape, **sizes, max_position_embeddings=32))
    with pytest.raises(MethodError, match="an encoder and a decoder"):
        PromptTokens(3).inject(model, [], 0)


def test_the_rest_of_a_text_and_masks_of_more_dimensions() -> None:
    model: Any = for_task("llama", "words")
    PromptTokens(3).inject(model, [], 0)
    model.double()
    ids = texts()[0]
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with pytest.raises(MethodError, match="use_cache=False"):
        model(input_ids=ids[:, :1], past_key_values=cache)
    with pytest.raises(MethodError, match=r"shape \(1, 1, 9, 9\)"):
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
