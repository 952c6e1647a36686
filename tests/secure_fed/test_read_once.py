"""A frozen encoder that reads each text once: what it keeps is what it would compute, and a function of the text alone."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secure_fed import Federation, RunConfig
from secure_fed.config import DataConfig, ModelConfig
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models import loading
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.tasks import build, classification
from secure_fed.learning.training import read_once as module
from secure_fed.learning.training.beside import copies_on
from secure_fed.learning.training.crew import copy_of
from secure_fed.learning.training.kinds import Kinds
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.read_once import read_once
from tests.secure_fed.test_loading import FAMILIES, saved

LONGEST = 24
CPU = torch.device("cpu")


def loaded(folder: Path) -> Any:
    model = loading.load(
        ModelConfig(name=str(folder), pooling="mean"), build(DataConfig()), ("calm", "wild", "other"), seed=0
    ).model
    train_only(model, ["classifier.weight", "classifier.bias"])
    return model


def remembering(folder: Path) -> Any:
    return objective(folder).model


def objective(folder: Path) -> Objective:
    made = Objective(loaded(folder), classification.loss, CPU, longest=LONGEST)
    read_once(made)
    return made


def texts(count: int, seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(4, 40, rng.integers(2, LONGEST + 1))) for _ in range(count)]


def batch(some: list[Tensor], extra: int = 0, **others: Any) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(some, batch_first=True)
    ids = nn.functional.pad(ids, (0, extra))
    mask = torch.stack([(torch.arange(ids.shape[1]) < len(text)).long() for text in some])
    return {"input_ids": ids, "attention_mask": mask, **others}


def counting(model: Any) -> list[int]:
    """The rows of every pass of the encoder from now on."""
    rows: list[int] = []
    model.encoder.register_forward_hook(
        lambda layer, args, kwargs, out: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize("family", FAMILIES)
def test_the_scores_are_those_of_the_model_without_dropout(family: str, tmp_path: Path, small_tokenizer: Any) -> None:
    """Whatever is read together, and from memory."""
    folder = saved(tmp_path, family, small_tokenizer)
    model, plain, some = remembering(folder), loaded(folder).eval(), texts(20)
    for _ in range(2):
        found = model(**batch(some)).logits
        with torch.no_grad():
            want = torch.cat([plain(input_ids=text.unsqueeze(0)).logits for text in some])
        assert torch.allclose(found, want, atol=1e-5)
    assert model.encoder.training, "as it was"


def test_a_text_is_read_once_whatever_it_is_padded_to(small_model: Path) -> None:
    model, some = remembering(small_model), texts(9)
    model(**batch(some))
    rows = counting(model)
    first = model(**batch(some, extra=5)).logits
    second = model(**batch(some[::-1])).logits
    assert rows == []
    assert torch.equal(first, second.flip(0))
    new = torch.tensor([7, 7, 7])
    model(**batch([*some, new]))
    assert 0 < sum(rows) <= 3, "the new text alone, and what fills its pass up"


def test_a_mean_is_the_same_to_the_bit_in_any_company(small_model: Path) -> None:
    """As a bound on what one text moves asks for: of 40 texts each, alone, in order and in reverse, in models of their own."""
    some = texts(40)
    alone, whole, turned = (remembering(small_model) for _ in range(3))
    means = torch.cat([alone.read(**batch([text]))[0] for text in some])
    assert torch.equal(whole.read(**batch(some))[0], means)
    assert torch.equal(turned.read(**batch(some[::-1]))[0].flip(0), means)


def test_what_divides_the_products_of_a_pass_leaves_the_encoder_alone(small_model: Path) -> None:
    """Else the bits of a mean would go by the pass in which its text was first seen."""
    model, seen = remembering(small_model), list[Any]()

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        model(**batch(texts(3)))
    assert seen.count(nn.functional.linear) == 1, "the head's"


def test_an_encoder_that_couples_texts_reads_each_alone(small_model: Path) -> None:
    model = remembering(small_model)
    model.encoder.register_forward_hook(
        lambda layer, args, out: setattr(
            out, "last_hidden_state", out.last_hidden_state - out.last_hidden_state.mean(0)
        )
    )
    some = texts(6)
    together = model.read(**batch(some))[0]
    rows = counting(model)
    kept = model.read(**batch(some[:1]))[0]
    assert rows == []
    assert torch.equal(kept[0], together[0])
    assert torch.equal(together, torch.zeros_like(together)), "each less the mean over itself"


def test_pairs_that_differ_in_types_alone_are_two(small_model: Path) -> None:
    model, plain = remembering(small_model), loaded(small_model).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    for types in (torch.tensor([[0, 0, 1, 1]]), torch.tensor([[0, 1, 1, 1]])):
        with torch.no_grad():
            want = plain(input_ids=ids, token_type_ids=types).logits
        assert torch.allclose(model(**batch(list(ids), token_type_ids=types)).logits, want, atol=1e-6)


def test_other_weights_read_anew(small_model: Path) -> None:
    model, some = remembering(small_model), texts(3)
    before = model(**batch(some)).logits
    with torch.no_grad():
        next(model.encoder.parameters()).mul_(1.5)
    changed = model(**batch(some)).logits
    assert not torch.allclose(before, changed)
    for weight in model.encoder.parameters():
        weight.data = weight.data * 0.5
    assert not torch.allclose(changed, model(**batch(some)).logits)


def test_an_encoder_that_trains_has_its_gradients(small_model: Path) -> None:
    model, some = remembering(small_model), texts(3)
    model(**batch(some))
    for weight in model.encoder.parameters():
        weight.requires_grad_()
    model(**batch(some)).logits.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in model.encoder.parameters())


def test_what_is_more_than_texts_is_computed(small_model: Path) -> None:
    model, some = remembering(small_model).eval(), texts(3)
    given = batch(some)
    assert len(model(**given, output_hidden_states=True).hidden_states) == 2
    embedded = model.get_input_embeddings()(given["input_ids"]).requires_grad_()
    model(inputs_embeds=embedded, attention_mask=given["attention_mask"]).logits.sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.any()
    ids, mask = given["input_ids"].flip(1), given["attention_mask"].flip(1)  # padded on the left
    with torch.no_grad():
        want = loaded(small_model).eval()(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, want)


def test_copies_with_the_same_weights_share_and_others_do_not(small_model: Path) -> None:
    whole = objective(small_model)
    model: Any = whole.model
    some = texts(5)
    model(**batch(some))
    shares: Any = copy_of(whole).model
    rows = counting(shares)
    shares(**batch(some))
    assert rows == []
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.encoder.parameters()).mul_(1.5)
    assert not torch.allclose(other(**batch(some)).logits, model(**batch(some)).logits)
    kept = model.read._kept
    assert kept is shares.read._kept
    assert kept is not other.read._kept
    assert len(kept.means) == 5


def test_a_full_memory_keeps_no_more(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", 16 * 4 * 3)
    model, plain, some = remembering(small_model), loaded(small_model).eval(), texts(6)
    model(**batch(some[:2]))
    found = model(**batch(some)).logits
    with torch.no_grad():
        assert torch.allclose(found, plain(**batch(some)).logits, atol=1e-5)
    assert len(model.read._kept.means) == 2


def test_texts_of_all_lengths_share_passes_after_they_are_read(small_model: Path) -> None:
    """And no longer ones: they would not fit the width."""
    whole, collate = objective(small_model), Collate(0)
    items = [{"input_ids": text.numpy(), "labels": 0} for text in [*texts(20), torch.full((LONGEST,), 5)]]
    kinds = Kinds(collate, whole.longest, whole.reads_once)
    assert len({kinds(item) for item in items}) == 1
    assert kinds({"input_ids": np.full(LONGEST + 1, 5), "labels": 0}) != kinds(items[0])
    of_kind = kinds.together(kinds(items[0]))
    assert torch.equal(whole(of_kind(items)), whole(collate(items)))
    copied = copies_on(whole, [CPU])[0]
    assert copied.reads_once
    assert not Objective(loaded(small_model), classification.loss, CPU, longest=LONGEST).reads_once


@pytest.mark.parametrize("privacy", [(), ("privacy.unit=example", "privacy.noise_multiplier=1.0")])
def test_a_run_of_the_head_alone_reads_each_text_once(
    privacy: tuple[str, ...], small_model: Path, small_data: Path
) -> None:
    """As many texts in one round as in six, where every text is in every step."""
    one, six = (rows_read(small_model, small_data, f"federation.rounds={rounds}", *privacy) for rounds in (1, 6))
    assert one == six > 0


def rows_read(model: Path, data: Path, *settings: str) -> int:
    given = [f"model.name={model}", f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}"]
    given += ["method.name=head", "model.pooling=mean", "federation.clients=3", "training.batch_size=64"]
    federation = Federation(RunConfig.load(None, [*given, *settings]))
    rows = counting(federation.assembly.objective.model)
    federation.run()
    return sum(rows)
