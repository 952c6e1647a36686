"""Generated tokens, compared with a loop over single prompts that reads the whole text again for each token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig, GPT2LMHeadModel

from secure_fed import RunConfig
from secure_fed.errors import ConfigError, MethodError, ModelError
from secure_fed.learning.generation import generated, keeps_cache, prompt_room
from secure_fed.methods import METHODS, build
from tests.cells import chosen, every
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.adapters.virtual import for_task

PROMPTS = [[3], [7, 9, 2, 30, 11, 5], [21, 4], [8, 8, 17], [5, 6, 33, 12, 1], [2, 39, 14, 26]]
NEW = 6
VIRTUAL = ("prefix_tuning", "prompt_tuning", "p_tuning")
# Virtual tokens, LoRA, adapters in series, experts, and biases, each in one architecture.
SAMPLE = [("prefix_tuning", "llama"), ("prompt_tuning", "gpt2"), ("fedlora", "gpt2"), ("adapter_houlsby", "llama")]
SAMPLE += [("adamix", "llama")]


def decoder(architecture: str) -> Any:
    """A language model in float64 that writes varied tokens, with room for all texts of this file."""
    config: Any = small_models.make(architecture).config
    config.num_hidden_layers, config.max_position_embeddings = 2, 64
    torch.manual_seed(1)
    model: Any = for_task(architecture, "words") if architecture == "llama" else GPT2LMHeadModel(config)
    for parameter in model.parameters():
        if architecture == "gpt2" and parameter.ndim > 1:
            parameter.data.mul_(8)
    return model.double().eval()


def named(method: str) -> RunConfig:
    return RunConfig().replace({("method", "name"): method, ("model", "max_length"): 16})


def with_method(name: str) -> Any:
    model = decoder("gpt2")
    build(named(name)).prepare(model, (), 0)
    return model.double()


@cache
def plain(architecture: str) -> list[list[int]]:
    """The tokens of the untrained model, which no test changes."""
    model = decoder(architecture)
    return [alone(model, prompt) for prompt in PROMPTS]


@torch.no_grad()
def alone(model: Any, prompt: Sequence[int], count: int = NEW) -> list[int]:
    """Greedy, by the plain call on the text alone, without padding and without a cache."""
    ids = torch.tensor([list(prompt)])
    for _ in range(count):
        ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], 1)
    return [int(token) for token in ids[0, len(prompt) :]]


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])
def test_tokens_are_those_of_a_loop_over_single_prompts(architecture: str) -> None:
    model, expected = decoder(architecture), plain(architecture)
    assert keeps_cache(model)
    for batch_size in (1, 4):
        assert generated(model, PROMPTS, NEW, batch_size=batch_size) == expected
    assert len({tuple(own) for own in expected}) > 3
    assert generated(model, [], NEW) == []
    assert generated(model, PROMPTS[:2], 0) == [[], []]


@pytest.mark.parametrize(("name", "architecture"), chosen(itertools.product(METHODS, ["llama", "gpt2"]), SAMPLE))
def test_every_method_writes_the_tokens_of_its_plain_call(architecture: str, name: str) -> None:
    model = decoder(architecture)
    try:
        tensors = build(named(name)).prepare(model, (), 0)
    except (MethodError, ConfigError) as error:
        pytest.skip(f"{name} takes no {architecture}: {error}")
    rng = torch.Generator().manual_seed(2)
    for parameter in map(model.get_parameter, tensors):  # a new adapter changes nothing
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=rng).to(parameter)
    model.double().eval()
    assert keeps_cache(model) is (name not in VIRTUAL)
    assert generated(model, PROMPTS, NEW, batch_size=4) == [alone(model, prompt) for prompt in PROMPTS]


class NoPositions(GPT2LMHeadModel):
    """It counts positions from the beginning of a row, padding or not."""

    def forward(self, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OldKeys(GPT2LMHeadModel):
    """Behind a cache it reads other tokens than it is given."""

    def forward(self, input_ids: Tensor, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length():
            input_ids = (input_ids + 1) % self.config.vocab_size
        return super().forward(input_ids, *args, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize("kind", [NoPositions, OldKeys])
def test_a_model_whose_padding_or_cache_is_wrong_is_read_again_for_each_token(kind: Any) -> None:
    model = decoder("gpt2")
    model.__class__ = kind
    assert not keeps_cache(model)
    assert generated(model, PROMPTS, NEW) == [alone(model, prompt) for prompt in PROMPTS]


class Own(nn.Module):
    """A model without `generate`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


def test_a_model_without_generate_is_read_again_for_each_token() -> None:
    assert generated(Own(decoder("llama")), PROMPTS, NEW) == plain("llama")


def test_the_models_own_settings_for_generation_change_nothing_and_stay() -> None:
    model, expected = decoder("llama"), plain("llama")
    sampled = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 9.0, "min_new_tokens": 3}
    model.generation_config = own = GenerationConfig(eos_token_id=expected[0][1], **sampled)
    assert generated(model, PROMPTS, NEW) == expected
    assert model.generation_config is own


@every("name", ["fedlora", "prompt_tuning"])
def test_a_stop_ends_its_row_alone(name: str) -> None:
    model = with_method(name)
    free = [alone(model, prompt) for prompt in PROMPTS]
    stops = [free[0][2], free[1][0]]
    cut = [own[: next((at for at, token in enumerate(own) if token in stops), NEW)] for own in free]
    assert generated(model, PROMPTS, NEW, stops=stops) == cut
    assert cut[1] == []
    assert max(map(len, cut)) >= 2


@pytest.mark.parametrize("name", chosen(["fedlora", "prompt_tuning"], ["prompt_tuning"]))
def test_draws_follow_the_seed_and_not_the_batch(name: str) -> None:
    model = with_method(name)
    before = torch.random.get_rng_state()
    first, again, other = (generated(model, PROMPTS, NEW, temperature=9.0, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    assert first == again != other
    assert first == generated(model, PROMPTS, NEW, temperature=9.0, seed=1, batch_size=2)
    assert generated(model, PROMPTS, NEW, temperature=1e-4) == [alone(model, prompt) for prompt in PROMPTS]


@torch.no_grad()
def test_draws_have_the_law_of_the_softmax() -> None:
    model, count = decoder("gpt2"), 2000
    scores = model(input_ids=torch.tensor([PROMPTS[1]])).logits[0, -1]
    temperature = float(scores.std())
    law = (scores / temperature).softmax(0)
    drawn = generated(model, [PROMPTS[1]] * count, 1, temperature=temperature, batch_size=1000)
    found = torch.bincount(torch.tensor([own[0] for own in drawn]), minlength=len(law)) / count
    deviation = (law * (1 - law) / count).sqrt()
    assert float(((found - law).abs() / deviation).max()) < 4.5
    assert float(law.max()) < 0.9


def test_a_prompt_leaves_room_for_its_answer() -> None:
    model = decoder("gpt2")
    assert prompt_room(model, 20, 30, "evaluation.max_new_tokens") == 20
    assert prompt_room(model, 50, 30, "evaluation.max_new_tokens") == 34
    build(named("prompt_tuning").replace({("method", "prompt_length"): 10})).prepare(model, (), 0)
    assert prompt_room(model, 50, 30, "evaluation.max_new_tokens") == 24
    model.double()
    assert len(generated(model, [[5] * 24], 30)[0]) == 30
    with refused(ConfigError, "evaluation.max_new_tokens"):
        prompt_room(model, 50, 54, "evaluation.max_new_tokens")


@every("name", ["fedlora", "prompt_tuning"])
def test_scores_that_are_no_numbers_are_refused(name: str) -> None:
    model = with_method(name)
    with torch.no_grad():
        model.transformer.wte.weight.fill_(math.nan)
    with refused(ModelError):
        generated(model, PROMPTS, NEW)
