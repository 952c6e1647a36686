"""Computations in bfloat16: every method, unit and kind of model learns as in float32, and keeps the promise of its unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from privacy.entropy import SeededEntropy
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes import trainings
from secure_fed.learning.training.common_passes.packing import Entry, Work
from secure_fed.learning.training.common_passes.passes import Pack
from secure_fed.learning.training.objective import Objective
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import State, loss_of
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.contracts.runs import PRIVACY, settings, supported
from tests.golden import refused
from tests.secure_fed import small_models
from tests.secure_fed.privately import less, norm
from tests.secure_fed.test_packs import CLIP, Sums, check_shares, sums

MODELS = ("bert", "llama")
POSSIBLE = [(method, model) for method in METHODS for model in MODELS if (method, model) != ("bitfit", "llama")]
RUNS = [(*cell, unit) for cell in POSSIBLE for unit in PRIVACY if supported(cell[0], unit)]
SOME_RUNS = [("fedlora", "llama", "none")]
UNITS: dict[str, list[int] | None] = {"example": None, "person": [0, 1, 1, 2, 0, 3]}
SHARES = [(*cell, unit) for cell in POSSIBLE if supported(cell[0], "example") for unit in UNITS]
SOME_SHARES = [("ia3", "llama", "person")]


def texts(count: int) -> list[dict[str, Any]]:
    """Texts of 3 to 11 tokens: an encoder of 16 positions has room for virtual tokens too."""
    rng = np.random.default_rng(3)
    lengths = [3 + (7 * number) % 9 for number in range(count)]
    return [{"input_ids": rng.integers(2, small_models.VOCABULARY, n), "labels": i % 3} for i, n in enumerate(lengths)]


def still(model: nn.Module) -> nn.Module:
    """The model without dropout, whose masks would depend on the company."""
    for layer in model.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    return model


@pytest.mark.parametrize(("method", "model", "unit"), chosen(RUNS, SOME_RUNS))
def test_a_run_ends_where_it_does_in_float32(method: str, model: str, unit: str) -> None:
    examples = texts(12)

    def ended(dtype: torch.dtype) -> Any:
        config = settings(method, unit, **{"federation.cohort": 3, "training.together": 8})
        own = still(small_models.make(model)).to(dtype)
        train = [examples[client::3] for client in range(3)]
        return Federation(config, model=own, train=train, test=examples, entropy=SeededEntropy(1)).run()

    expected, found = ended(torch.float32), ended(torch.bfloat16)
    assert [record["rejected"] for record in found.records] == [[], []]
    assert found.records[-1]["loss"] == pytest.approx(expected.records[-1]["loss"], abs=0.02)
    assert {found.state.tensors.tensor(name).dtype for name in found.state.tensors} == {torch.float32}
    assert all(bool(found.state.tensors.tensor(name).isfinite().all()) for name in found.state.tensors)


def shares(method: str, model: str, unit: str, dtype: torch.dtype) -> Sums:
    """From the drawn units, the sum of their clipped gradients, at tensors that are all away from zero."""
    own, rule = still(small_models.make(model)).to(dtype), build(settings(method, "example"))
    start = rule.prepare(own, small_models.head_of(own), 0)
    drawn = torch.Generator().manual_seed(1)
    before = Tensors(
        (name, start.tensor(name) + 0.05 * torch.randn(start.tensor(name).shape, generator=drawn)) for name in start
    )
    trained = set(rule.plan(State(before)).trainable)
    objective = Objective(own, loss_of(rule, classification.loss), torch.device("cpu"))
    if trained != set(before):  # the rest is loaded, so that all that remains trains
        objective.load(before)
        before = before.select(sorted(trained))
    return sums(objective, before, texts(6), Collate(0), UNITS[unit])


@pytest.mark.parametrize(("method", "model", "unit"), chosen(SHARES, SOME_SHARES))
def test_a_units_share_is_its_own_within_the_clip_norm_and_near_that_of_float32(
    method: str, model: str, unit: str
) -> None:
    """To the bit its own. Near: a twentieth of the clip norm."""
    units = len(set(UNITS[unit] or range(6)))
    found, expected = (shares(method, model, unit, dtype) for dtype in (torch.bfloat16, torch.float32))
    if method == "adamix":  # draws an adapter for every pass: a share keeps its distribution, and not its bits
        assert all(0 < norm(found([number])) <= CLIP for number in range(units))
        return
    check_shares(found, units, 1)
    for number in range(units):
        apart = norm(less(found([number]), expected([number])))
        assert 0 < apart <= 0.05 * CLIP


@dataclass(frozen=True)
class AllAtOnce:
    """One pass of all drawn examples, padded to the longest."""

    collate: Any

    def packs(self, entries: Sequence[Entry], clients: Sequence[int]) -> Iterator[Work]:
        owners = [owner for owner, _ in entries]
        items = [item for _, item in entries]
        yield Pack([clients[owner] for owner in owners], items, self.collate, len(items), each=True), owners


def test_broken_shares_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes without public shapes would move shares. Rounded to bfloat16 after clipping, a share may be longer than the clip
    norm, which is why norms and sums are float64.
    """
    monkeypatch.setattr(trainings, "Public", lambda objective, collate, *others, **more: AllAtOnce(collate))
    of = shares("fedlora", "bert", "example", torch.bfloat16)
    with pytest.raises(AssertionError):
        check_shares(of, 6, 2)
    own: Sequence[Any] = [of([number]) for number in range(6)]
    assert all(norm(one) <= CLIP for one in own)
    assert any(norm({name: part.bfloat16() for name, part in one.items()}) > CLIP for one in own)


def test_float16_is_refused_by_name() -> None:
    """Its largest number is 65,504: without scaled losses gradients vanish, and scores overflow."""
    with refused(ConfigError, "model.dtype"):
        settings("fedlora", **{"model.dtype": "float16"})
