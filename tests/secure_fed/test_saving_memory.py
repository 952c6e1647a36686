"""Checkpointing and bfloat16 change memory and time: every method, unit and kind of model learns as without them.

With checkpointing the numbers are the same; in bfloat16 they are near, and a unit's share keeps the promise of its unit.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from privacy.entropy import SeededEntropy
from secure_fed.errors import ConfigError, ModelError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Collate
from secure_fed.learning.models import dropout_and_checkpointing
from secure_fed.learning.tasks import classification
from secure_fed.learning.training.common_passes import trainings
from secure_fed.learning.training.common_passes.packing import Entry, Work
from secure_fed.learning.training.common_passes.passes import Pack
from secure_fed.learning.training.objective import Objective
from secure_fed.methods import METHODS, build
from secure_fed.methods.method import State, loss_of
from secure_fed.private import Budget, wrap
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.contracts.runs import PRIVACY, settings, supported
from tests.golden import refused
from tests.secure_fed import small_models, toys
from tests.secure_fed.privately import less, norm
from tests.secure_fed.test_packs import CLIP, Sums, check_shares, sums
from tests.secure_fed.test_per_example import without_dropout

CPU = torch.device("cpu")


def texts(count: int) -> list[dict[str, Any]]:
    """Texts of 3 to 11 tokens: an encoder of 16 positions has room for virtual tokens too."""
    rng = np.random.default_rng(3)
    lengths = [3 + (7 * number) % 9 for number in range(count)]
    return [{"input_ids": rng.integers(2, small_models.VOCABULARY, n), "labels": i % 3} for i, n in enumerate(lengths)]


TEXTS = texts(12)
CELLS = [
    (method, unit, architecture)
    for method in METHODS
    for unit in PRIVACY
    for architecture in ("bert", "llama")
    if supported(method, unit) and (method, architecture) != ("bitfit", "llama")  # which has no biases
]
EACH = [("fedft", "none", "llama"), ("federa", "none", "bert")]


def after(method: str, unit: str, model: Any, **more: Any) -> Tensors:
    """The final tensors of a run of three clients over two rounds."""
    config = settings(
        method, unit, **({"federation.cohort": 3, "training.batch_size": 4, "training.together": 8} | more)
    )
    train = [TEXTS[client::3] for client in range(3)]
    federation = Federation(config, model=model, train=train, test=TEXTS, entropy=SeededEntropy(1))
    return federation.run().state.tensors


def require_close(found: Tensors, expected: Tensors) -> None:
    for name in expected:
        torch.testing.assert_close(found.tensor(name), expected.tensor(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("method", "unit", "architecture"), chosen(CELLS, EACH))
def test_training_with_checkpointing_is_training_without_it(
    method: str, unit: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout, whose masks are drawn again."""
    expected = after(method, unit, small_models.make(architecture))
    calls, again, model = list[object](), dropout_and_checkpointing.again, small_models.make(architecture)
    noted: Any = lambda *args, **own: (calls.append(args), again(*args, **own))[1]  # noqa: E731
    monkeypatch.setattr(dropout_and_checkpointing, "again", noted)
    require_close(after(method, unit, model, **{"training.checkpointing": True}), expected)
    assert calls, "layers were computed again"


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("architecture", "unit", "reentrant"),
    chosen(
        itertools.product(["bert", "llama"], PRIVACY, [False, True]),
        [("llama", "none", False), ("bert", "none", True)],
    ),
)
def test_a_model_that_is_given_with_either_kind_on(architecture: str, unit: str, reentrant: bool) -> None:
    expected = after("federa", unit, small_models.make(architecture))
    model: Any = small_models.make(architecture)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    require_close(after("federa", unit, model), expected)
    assert dropout_and_checkpointing.is_checkpointing(model)
    if unit == "none":
        model = small_models.make(architecture)
        dropout_and_checkpointing.set_checkpointing(model, True)
        after("federa", unit, model, **{"training.checkpointing": False})
        assert not dropout_and_checkpointing.is_checkpointing(model)


def test_a_model_without_such_layers_is_refused() -> None:
    with refused(ConfigError, "training.checkpointing"):
        toys.federation({"training.checkpointing": True}).run()
    toys.federation({"training.checkpointing": False}).run()


def test_it_is_turned_on_where_activations_fill_half_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_models.make("llama")
    of_a_token = dropout_and_checkpointing.activations(model)
    monkeypatch.setattr(dropout_and_checkpointing, "memory", lambda device: 200 * of_a_token)
    wanted = [dropout_and_checkpointing.wanted("auto", model, tokens, CPU) for tokens in (None, 100, 101)]
    assert wanted == [False, False, True]
    assert not dropout_and_checkpointing.wanted("auto", toys.model(), 10**9, CPU)
    assert not dropout_and_checkpointing.wanted(False, model, 10**9, CPU)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_an_own_loop_over_a_model_with_checkpointing_on_is_refused() -> None:
    model: Any = small_models.make("bert")
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused(ModelError):
        wrap(model, optimizer, DataLoader(TEXTS, 4), Budget(8.0, 1e-3, steps=1))  # type: ignore[arg-type]


class Recomputed(toys.Toy):
    """Calls torch's checkpoint itself, which no flag shows. dropout: within, before what is computed again."""

    def __init__(self, reentrant: bool, dropout: float = 0.0, inputs: bool = False) -> None:
        super().__init__()
        self.again = partial(checkpoint, use_reentrant=reentrant)
        self.drop, self.inputs = torch.nn.Dropout(dropout), inputs

    def forward(self, x: Tensor) -> Tensor:
        if self.inputs and torch.is_grad_enabled():
            x = x.detach().requires_grad_()
        hidden: Any = self.again(lambda y: self.value(self.drop(self.query(y).tanh())).tanh(), x)
        scores: Tensor = self.classifier(hidden)
        return scores


class Plain(Recomputed):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__(False, dropout)
        self.again = lambda layers, x: layers(x)  # type: ignore[assignment]


UNITS: dict[str, dict[str, Any]] = {
    "alone": {},
    "together": {"training.together": 8},
    "client": {"privacy.unit": "client", "privacy.epsilon": 50.0, "privacy.delta": 0.1},
    "example": {"privacy.unit": "example", "privacy.epsilon": 50.0, "privacy.delta": 0.01},
}


def own(model: torch.nn.Module, unit: str) -> Tensors:
    model.load_state_dict(toys.model().state_dict(), strict=False)
    return toys.federation(UNITS[unit], model=model, entropy=SeededEntropy(3)).run().state.tensors


@pytest.mark.parametrize(
    ("unit", "reentrant", "dropout"),
    chosen(
        itertools.product(UNITS, [False, True], [0.0, 0.5]),
        [(unit, True, 0.0) for unit in UNITS] + [("together", False, 0.5)],
    ),
)
def test_checkpointing_in_the_code_of_a_model(unit: str, reentrant: bool, dropout: float) -> None:
    """With a gradient at its inputs, which the reentrant kind needs. Where dropout would be drawn anew, clients take turns."""
    expected, found = own(Plain(dropout), unit), own(Recomputed(reentrant, dropout, inputs=True), unit)
    if not dropout or unit == "alone":
        require_close(found, expected)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")
@every("unit", UNITS)
def test_a_layer_that_is_never_computed_with_a_gradient_is_refused(unit: str) -> None:
    with refused(ModelError):
        own(Recomputed(reentrant=True), unit)


class Features(toys.Toy):
    """Computes frozen features without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.features(x)
        return super().forward(x)


class Stopped(toys.Toy):
    """Learns to agree with its own scores, through which no gradient flows."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = super().forward(x)
        return super().forward(x) + 0.1 * target


def test_a_frozen_part_may_run_without_gradients_and_a_layer_a_second_time() -> None:
    toys.federation(model=Stopped()).run()
    toys.federation(model=Features()).run()
    whole = {"method.name": "fedft", "method.rank": 8, "method.modules_to_save": []}
    with refused(ModelError):
        toys.federation(whole, model=Features()).run()


@every("model", [toys.Toy(), Recomputed(reentrant=True)])
def test_nothing_that_watches_stays_on_a_model_after_its_run(model: torch.nn.Module) -> None:
    with suppress(ModelError):
        toys.federation(model=model).run()
    assert not any(module._forward_pre_hooks for module in model.modules())


# Computations in bfloat16.


MODELS = ("bert", "llama")
POSSIBLE = [(method, model) for method in METHODS for model in MODELS if (method, model) != ("bitfit", "llama")]
RUNS = [(*cell, unit) for cell in POSSIBLE for unit in PRIVACY if supported(cell[0], unit)]
SOME_RUNS = [("fedlora", "llama", "none")]
GROUPS: dict[str, list[int] | None] = {"example": None, "person": [0, 1, 1, 2, 0, 3]}
SHARES = [(*cell, unit) for cell in POSSIBLE if supported(cell[0], "example") for unit in GROUPS]
SOME_SHARES = [("fedlora", "bert", "person")]


@pytest.mark.parametrize(("method", "model", "unit"), chosen(RUNS, SOME_RUNS))
def test_a_run_ends_where_it_does_in_float32(method: str, model: str, unit: str) -> None:
    def ended(dtype: torch.dtype) -> Any:
        config = settings(method, unit, **{"federation.cohort": 3, "training.together": 8})
        own = without_dropout(small_models.make(model)).to(dtype)
        train = [TEXTS[client::3] for client in range(3)]
        return Federation(config, model=own, train=train, test=TEXTS, entropy=SeededEntropy(1)).run()

    expected, found = ended(torch.float32), ended(torch.bfloat16)
    assert [record["rejected"] for record in found.records] == [[], []]
    assert found.records[-1]["loss"] == pytest.approx(expected.records[-1]["loss"], abs=0.02)
    assert {found.state.tensors.tensor(name).dtype for name in found.state.tensors} == {torch.float32}
    assert all(bool(found.state.tensors.tensor(name).isfinite().all()) for name in found.state.tensors)


def shares(method: str, model: str, unit: str, dtype: torch.dtype) -> Sums:
    """From the drawn units, the sum of their clipped gradients, at tensors that are all away from zero."""
    own, rule = without_dropout(small_models.make(model)).to(dtype), build(settings(method, "example"))
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
    return sums(objective, before, texts(6), Collate(0), GROUPS[unit])


@pytest.mark.parametrize(("method", "model", "unit"), chosen(SHARES, SOME_SHARES))
def test_a_units_share_is_its_own_within_the_clip_norm_and_near_that_of_float32(
    method: str, model: str, unit: str
) -> None:
    """To the bit its own. Near: a twentieth of the clip norm."""
    units = len(set(GROUPS[unit] or range(6)))
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
