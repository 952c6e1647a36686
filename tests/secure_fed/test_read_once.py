"""A frozen encoder that reads each text once: a stored mean equals a computed one and depends on the text alone."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from secure_fed import Federation, RunConfig
from secure_fed.learning import read_once as module
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models.adapters.parameters import train_only
from secure_fed.learning.read_once import ReadOnce, read_once
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes.packing import Public, Room
from secure_fed.learning.training.common_passes.parallel import copy_of
from secure_fed.learning.training.local import Placed
from secure_fed.learning.training.objective import Objective
from secure_fed.learning.training.pass_shapes import Kinds
from secure_fed.learning.training.trials import made_up
from secure_fed.methods import METHODS
from secure_fed.runs import assembly
from tests.cells import chosen
from tests.secure_fed import toys
from tests.secure_fed.example_gradients import losses_at
from tests.secure_fed.test_loading import FAMILIES, saved
from tests.secure_fed.test_mean_pooled import load

LONGEST = 24
HEAD = ["classifier.weight", "classifier.bias"]
CPU = torch.device("cpu")


def loaded(folder: Path, **settings: Any) -> Any:
    model = load(folder, **settings).model
    train_only(model, HEAD)
    return model


def objective(folder: Path, **settings: Any) -> Objective:
    made = Objective(loaded(folder, **settings), classification.loss, CPU, longest=LONGEST)
    read_once(made, HEAD, 8)
    assert made.reads_once
    return made


def texts(count: int, seed: int = 0) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(4, 40, rng.integers(2, LONGEST + 1))) for _ in range(count)]


def batch(some: list[Tensor], extra: int = 0, **others: Any) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence(some, batch_first=True)
    ids = nn.functional.pad(ids, (0, extra))
    mask = torch.stack([(torch.arange(ids.shape[1]) < len(text)).long() for text in some])
    return {"input_ids": ids, "attention_mask": mask, **others}


def scores(whole: Objective, given: dict[str, Tensor]) -> Tensor:
    with whole.reading:
        found: Tensor = whole.model(**given).logits
    return found


def means(whole: Objective, some: list[Tensor]) -> Tensor:
    return read(whole, batch(some))


def read(whole: Objective, given: dict[str, Tensor]) -> Tensor:
    model: Any = whole.model
    with whole.reading:
        found: Tensor = model.read(**given)[0]
    return found


@torch.no_grad()
def plain(model: Any, given: dict[str, Tensor]) -> Tensor:
    found: Tensor = model.eval()(**given).logits
    return found


def counting(model: Any) -> list[int]:
    """A list that receives the number of rows of every later pass of the encoder."""
    rows: list[int] = []
    model.encoder.register_forward_hook(
        lambda layer, args, kwargs, out: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize("family", chosen(FAMILIES, ["bert", "llama"]))
def test_the_scores_are_those_of_the_model_without_dropout(family: str, tmp_path: Path, small_tokenizer: Any) -> None:
    """The scores are the same in any batch, and when means come from memory."""
    folder = saved(tmp_path, family, small_tokenizer)
    whole, other, some = objective(folder), loaded(folder), texts(20)
    want = torch.cat([plain(other, {"input_ids": text.unsqueeze(0)}) for text in some])
    for _ in range(2):
        assert torch.allclose(scores(whole, batch(some)), want, atol=1e-5)
    assert whole.model.get_submodule("encoder").training, "as it was"


@pytest.mark.parametrize("dtype", chosen(["bfloat16", "float16"], ["bfloat16"]))
def test_a_model_in_half_precision_keeps_its_own_type(dtype: str, small_model: Path) -> None:
    whole, some = objective(small_model, dtype=dtype), texts(5)
    found = scores(whole, batch(some))
    assert found.dtype == getattr(torch, dtype)
    assert torch.allclose(found, plain(loaded(small_model, dtype=dtype), batch(some)), atol=2e-2)


def test_a_text_is_read_once_whatever_it_is_padded_to(small_model: Path) -> None:
    whole, some = objective(small_model), texts(9)
    scores(whole, batch(some))
    rows = counting(whole.model)
    first = scores(whole, batch(some, extra=5))
    second = scores(whole, batch(some[::-1]))
    assert rows == []
    assert torch.equal(first, second.flip(0))
    new = torch.tensor([7, 7, 7])
    scores(whole, batch([*some, new]))
    assert 0 < sum(rows) <= 8, "the new text alone, and what fills its pass up"


def test_a_mean_is_the_same_to_the_bit_in_any_company(small_model: Path) -> None:
    """A bound on one text's influence needs this. Separate models read 20 texts alone, in order and in reverse."""
    some = texts(20)
    alone, whole, turned = (objective(small_model) for _ in range(3))
    each = torch.cat([means(alone, [text]) for text in some])
    assert torch.equal(means(whole, some), each)
    assert torch.equal(means(turned, some[::-1]).flip(0), each)


def test_a_text_with_a_hole_or_padded_in_front_changes_no_other(small_model: Path) -> None:
    """Such a text is read under its own mask, and without dropout like the others."""
    whole_text = [5, 6, 7, 8, 9, 10]
    ids = torch.tensor([[5, 6, 7, 8, 9, 0], whole_text, [0, 0, 7, 8, 9, 10], whole_text])
    mask = torch.tensor([[1, 1, 1, 1, 1, 0], [1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
    given = {"input_ids": ids, "attention_mask": mask}
    whole = objective(small_model)
    assert torch.equal(read(whole, given)[:1], means(objective(small_model), [ids[0, :5]]))
    assert torch.allclose(scores(whole, given), plain(loaded(small_model), given), atol=1e-6)


def test_a_text_that_fills_the_width_shares_no_pass_with_one_that_has_a_hole(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model takes another path where nothing of a batch is masked. The comparison is replaced: 8 texts share a pass."""
    monkeypatch.setattr(module, "agreeing_sizes", lambda run, probe, candidates: (8,))
    ids = torch.stack([torch.arange(4, 4 + LONGEST), torch.arange(5, 5 + LONGEST)])
    mask = torch.ones_like(ids)
    mask[1, 3] = 0
    whole, given = objective(small_model), {"input_ids": ids, "attention_mask": mask}
    seen: list[Tensor] = []
    whole.model.get_submodule("encoder").register_forward_hook(
        lambda layer, args, kwargs, out: seen.append(kwargs["attention_mask"]), with_kwargs=True
    )
    read(whole, given)
    assert not [one for one in seen if one.all(1).any() and not one.all()]


def test_what_divides_the_products_of_a_pass_leaves_the_encoder_alone(small_model: Path) -> None:
    """Otherwise the bits of a mean would depend on the pass in which its text was first read."""
    whole, seen = objective(small_model), list[Any]()

    class Watching(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watching():
        scores(whole, batch(texts(3)))
    assert seen.count(nn.functional.linear) == 1, "the head's"


def test_an_encoder_that_couples_texts_reads_each_alone(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a comparison shows it, and where its layers do."""
    whole, some = objective(small_model), texts(6)
    model: Any = whole.model
    model.encoder.register_forward_hook(
        lambda layer, args, out: setattr(
            out, "last_hidden_state", out.last_hidden_state - out.last_hidden_state.mean(0)
        )
    )
    together = means(whole, some)
    assert torch.equal(together, torch.zeros_like(together)), "each less the mean over itself"
    rows = counting(model)
    assert torch.equal(means(whole, some[:1])[0], together[0])
    assert rows == []
    monkeypatch.setattr(module, "couples_examples", lambda model: True)
    rows = counting((known := objective(small_model)).model)
    means(known, some)
    assert rows == [1] * 6


def test_pairs_that_differ_in_types_alone_are_two(small_model: Path) -> None:
    whole, other, ids = objective(small_model), loaded(small_model), torch.tensor([[5, 6, 7, 8]])
    for types in ([[0, 0, 1, 1]], [[0, 1, 1, 1]]):
        given = batch(list(ids), token_type_ids=torch.tensor(types))
        assert torch.allclose(scores(whole, given), plain(other, given), atol=1e-6)


def test_other_weights_read_anew(small_model: Path) -> None:
    whole, some = objective(small_model), texts(3)
    before = scores(whole, batch(some))
    with torch.no_grad():
        next(whole.model.get_submodule("encoder").parameters()).mul_(1.5)
    changed = scores(whole, batch(some))
    assert not torch.allclose(before, changed)
    for weight in whole.model.get_submodule("encoder").parameters():
        weight.data = weight.data * 0.5
    assert not torch.allclose(changed, scores(whole, batch(some)))


def test_only_the_objective_knows_what_was_read(small_model: Path) -> None:
    """The means belong to the objective. The model itself follows a change of its weights and is saved without them."""
    whole, some = objective(small_model), texts(3)
    model: Any = whole.model
    scores(whole, batch(some))
    assert "read" not in vars(model)
    for weight in model.encoder.parameters():
        weight.requires_grad_()
        weight.data.mul_(1.5)
    given = batch(some)
    assert torch.allclose(plain(model, given), plain(copy.deepcopy(model), given))
    model(**given).logits.sum().backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in model.encoder.parameters())
    torch.save(model, stored := io.BytesIO())
    assert b"read_once" not in stored.getvalue()


def test_what_is_more_than_texts_is_computed_without_dropout(small_model: Path) -> None:
    whole, some = objective(small_model), texts(3)
    model: Any = whole.model
    embedded = model.get_input_embeddings()(batch(some)["input_ids"]).detach().requires_grad_()
    found = scores(whole, {"inputs_embeds": embedded, "attention_mask": batch(some)["attention_mask"]})
    found.sum().backward()
    assert embedded.grad is not None
    assert embedded.grad.any()
    assert torch.allclose(found, scores(whole, batch(some)), atol=1e-5)


def test_copies_with_the_same_weights_share_and_others_do_not(small_model: Path) -> None:
    whole, some = objective(small_model), batch(texts(5))
    found = scores(whole, some)
    for copied, shares in ((copy_of(whole), True), (copy.deepcopy(whole), False)):
        rows = counting(copied.model)
        assert torch.equal(scores(copied, some), found)
        assert (rows == []) == shares


def test_a_full_memory_keeps_no_more(small_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST", (16 * 4 + 1024) * 3)
    whole, some = objective(small_model), texts(6)
    scores(whole, batch(some[:2]))
    assert torch.allclose(scores(whole, batch(some)), plain(loaded(small_model), batch(some)), atol=1e-5)
    assert isinstance(whole.reading, ReadOnce)
    assert len(whole.reading._kept.means) == 2


def test_texts_of_all_lengths_share_passes_after_they_are_read(small_model: Path) -> None:
    """Texts longer than the width do not: they would not fit the pass."""
    whole, collate = objective(small_model), Collate(0)
    items = [{"input_ids": text.numpy(), "labels": 0} for text in [*texts(20), torch.full((LONGEST,), 5)]]
    kinds = Kinds.of(whole, collate)
    assert len({kinds(item) for item in items}) == 1
    assert kinds({"input_ids": np.full(LONGEST + 1, 5), "labels": 0}) != kinds(items[0])
    together = kinds.together(kinds(items[0]))
    assert torch.equal(losses_at(whole, {}, together(items)), losses_at(whole, {}, collate(items)))
    wide = Kinds(collate, 100, reads_once=True)
    made = made_up(wide, wide(items[0]), whole.model, items[0], 9)
    assert 0 < max(len(item["input_ids"]) for item in made) < 40, "a comparison reads no longer ones than it has to"


def test_texts_of_like_lengths_share_a_pass_so_that_the_encoder_fills_up_few(small_model: Path) -> None:
    """Equally long texts keep their order: an owner's own examples alone decide the order of its gradients."""
    whole = objective(small_model)
    entries = [(at % 3, {"input_ids": text.numpy(), "labels": 0}) for at, text in enumerate(texts(60))]
    head = toys.weights(whole.model).select(HEAD)
    room = Room.of(CPU, whole.model, 1000, public=True)
    packs = Public(whole, Collate(0), room, Placed.of(head, HEAD, CPU)).packs(entries, range(3))
    found = [id(item) for pack, _ in packs for item in pack.items[: pack.count]]
    assert found == [id(item) for _, item in sorted(entries, key=lambda entry: len(entry[1]["input_ids"]))]


@pytest.mark.parametrize("method", chosen(METHODS, ["head", "c2a", "fedlora"]))
def test_only_the_head_alone_leaves_the_encoder_as_it_is(method: str, small_model: Path, small_data: Path) -> None:
    def reads_once(*more: str) -> bool:
        made = configured(small_model, small_data, f"method.name={method}", *more)
        return made.assembly.objective.reads_once

    assert reads_once() == (method == "head")
    assert method != "head" or not reads_once("method.modules_to_save=LayerNorm"), "a part of it trains"


def test_a_model_that_is_given_reads_as_its_owner_made_it(small_model: Path) -> None:
    items = [{"input_ids": text.numpy(), "labels": 0} for text in texts(6)]
    settings = RunConfig.from_dict({"method": {"name": "head"}})
    given = Federation(settings, model=loaded(small_model), train=[items, items], test=items)
    assert not given.assembly.objective.reads_once


def test_what_changes_in_a_later_round_counts_from_the_first(
    small_model: Path, small_data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A method may train the head alone in its first rounds and an adapter later: every tensor that ever trains counts."""
    asked: list[list[str]] = []
    monkeypatch.setattr(assembly, "read_once", lambda objective, names, most: asked.append(names))
    federation = configured(small_model, small_data, "method.name=rolora")
    assert asked == [list(federation.assembly.initial.tensors)]
    assert set(federation.assembly.method.plan(federation.assembly.initial).trainable) < set(asked[0])


def configured(model: Path, data: Path, *settings: str) -> Federation:
    given = [f"model.name={model}", f"data.train={data / 'train.jsonl'}", f"data.test={data / 'test.jsonl'}"]
    given += ["model.pooling=mean", "model.max_length=24", "federation.clients=3", "training.batch_size=64"]
    return Federation(RunConfig.load(None, [*given, *settings]))


@pytest.mark.parametrize("privacy", [(), ("privacy.unit=example", "privacy.noise_multiplier=1.0")])
def test_a_run_of_the_head_alone_reads_each_text_once(
    privacy: tuple[str, ...], small_model: Path, small_data: Path
) -> None:
    """One round reads as many texts as two, where every step has every text."""

    def rows_read(rounds: int) -> int:
        settings = ("method.name=head", f"federation.rounds={rounds}", *privacy)
        federation = configured(small_model, small_data, *settings)
        rows = counting(federation.assembly.objective.model)
        federation.run()
        return sum(rows)

    assert rows_read(1) == rows_read(2) > 0
