"""Losses of a language model in chunks, compared with the scores of all tokens at once.

Language modelling and multiple choice, compared with loops over single tokens.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
)

from secure_fed.config import DataConfig, ModelConfig
from secure_fed.errors import DataError, ModelError
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.data.rows import Rows, Table
from secure_fed.learning.models.adapters.per_example import EachOwn
from secure_fed.learning.models.dropout_and_checkpointing import OwnDropout
from secure_fed.learning.models.loading import load
from secure_fed.learning.tasks import build, next_tokens
from secure_fed.learning.tasks.causal_lm import continuations, loss, metrics, perplexity
from secure_fed.learning.tasks.next_tokens import last_scores, rows_together, surprise, token_losses
from tests.cells import every
from tests.golden import refused

VOCABULARY, ROWS, LENGTH, MOST = 61, 5, 14, 800  # at most 800 scores: 13 positions of one row, or 2 of each
WEIGHTS = torch.tensor([1.0, -2.0, 3.0, 0.5, 1.5])
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
Context = Callable[[], AbstractContextManager[None]]


_SMALL: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
_OPT = {"hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_LORA = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}


def llama() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**_SHAPE))


def with_adapter(adapter: peft.PeftConfig) -> nn.Module:
    found: nn.Module = peft.get_peft_model(llama(), adapter)
    return found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": llama,
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**_SHAPE, head_dim=8, final_logit_softcapping=0.5)),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**_SHAPE, logits_scaling=0.2)),
    "cohere": lambda: CohereForCausalLM(CohereConfig(**_SHAPE, logit_scale=5.0)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **_SMALL, bos_token_id=1, eos_token_id=2)),
    # Its head reads past its base model, so that it cannot be taken apart.
    "opt": lambda: OPTForCausalLM(OPTConfig(vocab_size=VOCABULARY, **_OPT, max_position_embeddings=32)),
    "LoRA": lambda: with_adapter(peft.LoraConfig(**_LORA)),
    "prefix": lambda: with_adapter(peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)),
}


@pytest.fixture(autouse=True)
def _chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(next_tokens, "MOST", MOST)
    monkeypatch.setattr(next_tokens, "FEW", 0)


def made(model: str | Callable[[], nn.Module], *, head: bool = False) -> nn.Module:
    """The model in evaluation mode. head: whether its output layer trains too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        found = (MODELS[model] if isinstance(model, str) else model)().eval()
    if not head:
        found.get_output_embeddings().requires_grad_(False)  # type: ignore[operator]
    return found


def batch(labelled: int | None = None) -> dict[str, Tensor]:
    """Rows of several lengths, with other numbers of labelled tokens; row 2 has none. labelled: of every row but the first."""
    draws = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=draws)
    mask, labels = torch.ones_like(ids), ids.clone()
    for row, length in enumerate((14, 9, 12, 5, 14)):
        mask[row, length:] = 0
        labels[row, length:] = IGNORED
        labels[row, : 2 * row] = IGNORED
    labels[2] = IGNORED
    if labelled is not None:
        labels[1:] = IGNORED
        labels[1:, 2 : 2 + labelled] = ids[1:, 2 : 2 + labelled]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def whole(model: nn.Module, given: Mapping[str, Tensor]) -> Tensor:
    """The losses from all scores at once, in float64 from there."""
    scores = model(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits.double()
    targets = given["labels"][:, 1:]
    each = functional.cross_entropy(scores[:, :-1].mT, targets, reduction="none", ignore_index=IGNORED)
    return each.sum(1) / (targets != IGNORED).sum(1).clamp(min=1)


def gradient(losses: Tensor, model: nn.Module) -> Tensor:
    """The gradient of a weighted sum of the losses, as one vector."""
    moving = [one for one in model.parameters() if one.requires_grad]
    parts = torch.autograd.grad(
        (losses * WEIGHTS[: len(losses)]).sum(), moving, allow_unused=True, materialize_grads=True
    )
    return torch.cat([part.flatten().double() for part in parts])


@every(
    ("model", "head", "context"),
    [(model, head, context) for model in MODELS for head in (False, True) for context in (nullcontext, rows_together)],
)
def test_losses_and_gradients_are_those_of_all_scores(model: str, head: bool, context: Context) -> None:
    one, given = made(model, head=head), batch()
    with context():
        found = loss(one, given)
        slopes = gradient(found, one)
    expected = whole(one, given)
    own = gradient(expected, one)
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert float((slopes - own).norm() / own.norm()) < 1e-6


def test_many_scores_cost_no_digits() -> None:
    """torch's own cross-entropy loses two or three in float32, with 49,152 scores a token."""
    targets = torch.tensor([0, 7, IGNORED, 49_151, 5, 5])
    scores = (3 * torch.randn(6, 49_152, generator=torch.Generator().manual_seed(0))).requires_grad_()
    exact = scores.detach().double().requires_grad_()
    losses = surprise(scores, targets)
    expected = functional.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORED)
    (slopes,), (own,) = (torch.autograd.grad(each.sum(), part) for each, part in ((losses, scores), (expected, exact)))
    assert losses.tolist() == pytest.approx(expected.tolist(), rel=1e-6)
    assert float((slopes - own).norm() / own.norm()) < 1e-6


@every(("head", "context"), [(head, context) for head in (False, True) for context in (nullcontext, rows_together)])
def test_a_batch_without_labels_has_loss_0_and_gradient_0(head: bool, context: Context) -> None:
    one, given = made(llama, head=head), batch(labelled=0)
    given["labels"][0] = IGNORED
    for rows in (slice(None), slice(0, 1)):
        with context():
            losses = loss(one, {name: part[rows] for name, part in given.items()})
            assert losses.tolist() == [0.0] * len(losses)
            assert not gradient(losses, one).any()


def read_by(model: Any, given: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
    """The shapes of the states that the output layer reads, forward and backward."""
    shapes: list[tuple[int, ...]] = []
    hook = model.get_output_embeddings().register_forward_hook(
        lambda layer, args, output: shapes.append(tuple(args[0].shape))
    )
    losses = loss(model, given)
    gradient(losses, model)
    hook.remove()
    return shapes


def test_what_the_head_reads_of_several_rows_follows_their_widths_alone() -> None:
    """A product's rounding depends on its shape, so no label may decide it where rows are protected."""
    one = made(llama)
    loss(one, batch())  # the comparison of a model that is new
    shapes = []
    for labelled in (None, 0, 1, 9):
        given = batch(labelled)
        given["labels"][0, 4:] = IGNORED
        shapes.append(read_by(one, given))
    assert shapes == [[(ROWS, 2, 16)] * 6 + [(ROWS, 1, 16)]] * 4
    assert all(rows * count * VOCABULARY <= MOST for rows, count, _ in shapes[0])


@every("model", [model for model in MODELS if model not in ("opt", "prefix")])
def test_no_more_scores_are_made_at_once(model: str) -> None:
    one, given = made(model), batch()
    loss(one, given)
    assert max(rows * count * VOCABULARY for rows, count, _ in read_by(one, given)) <= MOST


def test_labelled_positions_alone_are_read_of_one_row_and_where_nobody_is_protected() -> None:
    one, given = made(llama), batch(labelled=3)
    first, second = ({name: part[row : row + 1] for name, part in given.items()} for row in (0, 1))
    loss(one, given)
    assert read_by(one, first) == [(1, 13, 16)]
    assert read_by(one, second) == [(1, 3, 16)]
    with rows_together():
        assert read_by(one, given) == [(1, 13, 16), (1, 12, 16)]  # 13 of the first row, 3 of each other
    assert read_by(one, second) == [(1, 3, 16)]


def test_a_head_of_each_examples_own_gets_each_examples_gradient() -> None:
    one, given = made(llama), batch()
    draws = torch.Generator().manual_seed(2)
    heads = torch.randn(ROWS, VOCABULARY, 16, generator=draws).requires_grad_()
    for context in (nullcontext, rows_together):
        with context():
            losses = _with(one, EachOwn.of(heads), given)
            (together,) = torch.autograd.grad(losses.sum(), heads)
        for row in range(ROWS):
            head = heads[row].detach().requires_grad_()
            alone = _with(one, head, {name: part[row : row + 1] for name, part in given.items()})
            (own,) = torch.autograd.grad(alone.sum(), head)
            assert float(losses[row].detach()) == pytest.approx(float(alone.detach()), rel=1e-6)
            assert float((together[row] - own).norm()) <= 1e-6 * float(own.norm())


def _with(model: nn.Module, head: Tensor, given: Mapping[str, Tensor]) -> Tensor:
    """The losses with this output layer, whose tensor is in the model for the forward pass alone."""

    class Losses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self) -> Tensor:
            return loss(self.model, given)

    found: Tensor = functional_call(Losses(), {"model.lm_head.weight": head}, ())
    return found


def test_dropout_in_a_head_that_trains_is_drawn_once() -> None:
    """With a generator that the backward pass would not find as the forward pass did (`OwnDropout`)."""
    adapted = peft.LoraConfig(r=2, target_modules=["lm_head"], lora_dropout=0.5, init_lora_weights=False)
    one, given = made(lambda: peft.get_peft_model(llama(), adapted), head=True).train(), batch()
    moving = [parameter for parameter in one.parameters() if parameter.requires_grad]

    def losses() -> Tensor:
        with OwnDropout(3, torch.device("cpu")):
            return loss(one, given)

    slopes = gradient(losses(), one)
    along = torch.randn(len(slopes), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ends = []
    for step in (1e-3, -1e-3):
        parts = (step * along).float().split([parameter.numel() for parameter in moving])
        with torch.no_grad():
            for parameter, part in zip(moving, parts, strict=True):
                parameter += part.view(parameter.shape)
            ends.append(float((losses() * WEIGHTS).sum()))
            for parameter, part in zip(moving, parts, strict=True):
                parameter -= part.view(parameter.shape)
    assert (ends[0] - ends[1]) / 2e-3 == pytest.approx(float(slopes @ along), rel=1e-2)


def test_a_hook_on_the_model_sees_the_scores_of_all_tokens() -> None:
    """As methods that compare two passes need them (`methods.consistency`)."""
    one, given, seen = made(llama), batch(), list[tuple[int, ...]]()
    expected = loss(one, given).tolist()
    hook = one.register_forward_hook(lambda model, args, output: seen.append(tuple(output.logits.shape)))
    assert loss(one, given).tolist() == pytest.approx(expected, rel=1e-6)
    hook.remove()
    assert seen == [(ROWS, LENGTH, VOCABULARY)]


def test_comparing_a_new_model_draws_no_number_and_leaves_its_modes() -> None:
    one = made(lambda: LlamaForCausalLM(LlamaConfig(**_SHAPE, attention_dropout=0.5)))
    one.train().get_submodule("model.layers.1").eval()
    modes = [module.training for module in one.modules()]
    torch.manual_seed(4)
    first = loss(one, batch())  # with the comparison
    torch.manual_seed(4)
    assert torch.equal(loss(one, batch()), first)
    assert [module.training for module in one.modules()] == modes


@every("model", MODELS)
def test_the_scores_after_a_text_are_those_of_its_last_token(model: str) -> None:
    one, given = made(model), batch()
    with torch.no_grad():
        scores = one(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
        found = last_scores(one, given)
    ends = given["attention_mask"].sum(1) - 1
    assert torch.allclose(found, scores[range(ROWS), ends], rtol=1e-5, atol=1e-6)


@every("context", [nullcontext, rows_together])
def test_metrics_are_those_of_all_scores(context: Context) -> None:
    one, given = made(llama), batch()
    with torch.no_grad(), context():
        found = metrics(one, [given, {name: part[:2] for name, part in given.items()}])
        scores = one(input_ids=given["input_ids"], attention_mask=given["attention_mask"]).logits
        expected = whole(one, given)
    targets = given["labels"][:, 1:]
    right = (scores[:, :-1].argmax(2) == targets).sum(1)
    told = (targets != IGNORED).sum(1)
    assert found["accuracy"] == pytest.approx(float((right.sum() + right[:2].sum()) / (told.sum() + told[:2].sum())))
    assert found["loss"] == pytest.approx(float(torch.cat([expected, expected[:2]]).mean()), rel=1e-6)


def test_half_precision_gives_losses_in_float32() -> None:
    one, given = made(llama).bfloat16(), batch()
    found, counted = token_losses(one, given)
    assert found.dtype == torch.float32
    assert torch.equal(counted, given["labels"][:, 1:] != IGNORED)
    expected = whole(one, given)
    assert (found.sum(1) / counted.sum(1).clamp(min=1)).tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    slopes, own = gradient(found.sum(1) / counted.sum(1).clamp(min=1), one), gradient(expected, one)
    assert float((slopes - own).norm() / own.norm()) < 0.02


# The tasks.


TEXTS = ("word1 word2 word3 word4", "calm", "word9 word8 word7 wild word6 word5", "")


def naive(model: Any, ids: list[int], told: list[int]) -> list[float]:
    """The negative log-likelihoods of the tokens at the places `told`, each from a forward pass over the tokens before it."""
    found = []
    for place in told:
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([ids[:place]])).logits[0, -1].double()
        found.append(float(scores.logsumexp(0) - scores[ids[place]]))
    return found


@pytest.fixture(scope="module")
def model(gpt2: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(gpt2).eval()


def test_loss_and_perplexity_are_those_of_a_loop(model: Any, small_tokenizer: Any) -> None:
    task = build(DataConfig(task="causal_lm"))
    encoded = task.encode(small_tokenizer, Rows(TEXTS, (None,) * 4, ()), 32)
    assert encoded[0]["input_ids"].tolist() == [2, 7, 8, 9, 10, 3]
    told = [
        [place for place in range(1, len(item["input_ids"])) if item["labels"][place] != IGNORED] for item in encoded
    ]
    assert told == [[1, 2, 3, 4], [1], [1, 2, 3, 4, 5, 6], []]  # places of the text's tokens; a blank text has none
    each = [naive(model, item["input_ids"].tolist(), places) for item, places in zip(encoded, told, strict=True)]
    batch = task.collate(small_tokenizer)(list(encoded))
    with torch.no_grad():
        losses = task.loss(())(model, batch)
    means = [sum(one) / max(1, len(one)) for one in each]
    assert losses.tolist() == pytest.approx(means, rel=1e-4)
    halves = [task.collate(small_tokenizer)(list(encoded)[part]) for part in (slice(0, 3), slice(3, 4))]
    with torch.no_grad():
        found = task.metrics(())(model, halves)
    flat = [loss for one in each for loss in one]
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(flat)), rel=1e-4)
    assert found["loss"] == pytest.approx(np.mean(means), rel=1e-4)
    answers = task.answers(model, batch, ())
    assert [one["log_likelihood"] for one in answers] == pytest.approx([-sum(one) for one in each], rel=1e-4)
    assert [one["tokens"] for one in answers] == [4, 1, 6, 0]
    assert answers[3]["perplexity"] is None


@every("learn_prompt", [False, True])
def test_a_prompt_is_read_and_learned_only_if_asked(small_tokenizer: Any, learn_prompt: bool) -> None:
    task = build(DataConfig(task="causal_lm", text_b="answer", learn_prompt=learn_prompt))
    rows = Rows(("calm word1",), (None,), (), ("wild word2",))
    (item,) = task.encode(small_tokenizer, rows, 32)
    assert item["input_ids"].tolist() == [2, 4, 7, 5, 8, 3]
    prompt = [4, 7] if learn_prompt else [IGNORED, IGNORED]
    assert item["labels"].tolist() == [IGNORED, *prompt, 5, 8, IGNORED]


def test_the_end_token_is_learned_behind_a_target_alone(small_tokenizer: Any) -> None:
    ending = copy.deepcopy(small_tokenizer)
    ending.eos_token = "word3"
    made = list(continuations(ending, ["calm", ""], ["wild", "word0"], 32, ends=True))
    assert made[0]["input_ids"].tolist() == [2, 4, 5, 9]
    assert made[0]["labels"].tolist() == [IGNORED, IGNORED, 5, 9]


@every(
    ("prompt", "target", "length", "ids", "told"),
    [
        ("word0 word1 word2", "wild", 5, [2, 7, 8, 5, 3], [5]),  # the prompt's beginning is cut first
        ("word0 word1", "wild wild wild", 4, [2, 5, 5, 5], [5, 5, 5]),  # then the target's end is cut
        ("", "word0 word1 word2", 3, [2, 6, 7], [6, 7]),
        ("word0 word1 word2", "", 4, [2, 7, 8, 3], []),
        ("ends here ", "wild", 8, [2, 1, 1, 5, 3], [5]),
    ],
)
def test_what_is_too_long_keeps_the_target(
    small_tokenizer: Any, prompt: str, target: str, length: int, ids: list[int], told: list[int]
) -> None:
    (item,) = continuations(small_tokenizer, [prompt], [target], length)
    assert item["input_ids"].tolist() == ids
    assert [label for label in item["labels"].tolist() if label != IGNORED] == told


def test_perplexity_of_nothing_and_of_too_much() -> None:
    assert math.isnan(perplexity(0.0, 0.0))
    assert perplexity(1e6, 2.0) == math.inf
    assert math.isnan(perplexity(math.nan, 2.0))


def test_an_encoder_cannot_tell_tokens_it_has_read(small_model: Path, gpt2: Path, llama: Path) -> None:
    task = build(DataConfig(task="causal_lm"))
    for folder in (gpt2, llama):
        loaded = load(ModelConfig(name=str(folder)), task, (), 0)
        assert loaded.head == ()  # its output layer was pre-trained
    with refused(ModelError, "model.name"):
        load(ModelConfig(name=str(small_model)), task, (), 0)


# Multiple choice


CHOICES = Rows(
    ("calm word1", "wild", "word3"), (1, 0, 2), (), (("word2", "wild wild"), ("word5 word6", "calm"), ("calm",) * 3)
)


@pytest.mark.parametrize("likelihood", ["mean", "sum"])
def test_choices_are_scored_as_by_a_loop(model: Any, small_tokenizer: Any, likelihood: str) -> None:
    task = build(DataConfig(task="multiple_choice", likelihood=likelihood))
    items = list(task.encode(small_tokenizer, CHOICES, 32))
    found = task.answers(model, task.collate(small_tokenizer)(items), ())
    for row, (answer, prompt, choices) in enumerate(zip(found, CHOICES.text, CHOICES.text_b or (), strict=True)):
        expected = []
        for choice in choices:
            ids = small_tokenizer(f"{prompt} {choice}")["input_ids"]
            first = len(small_tokenizer(prompt)["input_ids"]) - 1
            each = naive(model, ids, list(range(first, len(ids) - 1)))
            expected.append(-sum(each) / (len(each) if likelihood == "mean" else 1))
        assert answer["likelihoods"] == pytest.approx(expected, rel=1e-4), row
        assert answer["label"] == int(np.argmax(expected))
        assert answer["choice"] == choices[answer["label"]]
    right = [answer["label"] == label for answer, label in zip(found, CHOICES.label, strict=True)]
    with torch.no_grad():
        measured = task.metrics(())(model, [task.collate(small_tokenizer)([item]) for item in items])
    assert measured["accuracy"] == pytest.approx(np.mean(right))


def test_a_question_is_one_item_and_trains_on_its_right_choice(small_tokenizer: Any) -> None:
    task = build(DataConfig(task="multiple_choice"))
    encoded = task.encode(small_tokenizer, CHOICES, 32)
    assert [len(item["parts"]) for item in encoded] == [2, 2, 3]
    for item, right in zip(encoded, CHOICES.label, strict=True):
        assert item["input_ids"].tolist() == item["parts"][right]["input_ids"].tolist()


def table(choices: list[object], labels: list[object]) -> Table:
    columns: dict[str, list[object]] = {"text": ["q"] * len(choices), "choices": choices, "label": labels}
    return Table("x.jsonl", columns, tuple(columns), range(1, len(choices) + 1))


def test_the_right_choice_is_told_by_its_number_or_its_text_in_one_way() -> None:
    """Row by row, "1" and "2" would be the first and the second choice, and "0" the first again."""
    task = build(DataConfig(task="multiple_choice"))
    train, _ = task.read([table([["a", "b"], ["a", "b"], ["a", "b"]], [1, "0", "b"])], [])
    assert train.label == (1, 0, 1)
    choices = [["1", "2", "3"]] * 3
    assert task.read([table([*choices], ["0", "1", "2"])], [])[0].label == (0, 1, 2)
    assert task.read([table([*choices], ["3", "1", "2"])], [])[0].label == (2, 0, 1), "3 is no number of a choice"
    with refused(DataError):
        task.read([table([*choices], ["1", "2", "1"])], [])


@every(
    ("choices", "label"),
    [
        (["a", "b"], 2),
        (["a", "b"], "c"),
        (["a", "b"], True),
        (["a", "b"], None),
        (["a"], 0),
        (["a", " "], 0),
        ("a b", 0),
    ],
)
def test_choices_that_are_none_are_refused(choices: object, label: object) -> None:
    with refused(DataError):
        build(DataConfig(task="multiple_choice")).read([table([["a", "b"], choices], [0, label])], [])
