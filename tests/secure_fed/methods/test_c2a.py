"""C2A: where class shares are stored and where they are not sent, and privacy units."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from secure_fed.config import MethodConfig
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.models.adapters.hypernetwork import SHARES
from secure_fed.methods import build
from secure_fed.methods.c2a import C2a
from secure_fed.methods.method import CHANGE, Contextual, State
from secure_fed.tensors.tensors import Layout
from tests.cells import chosen, every
from tests.contracts import runs
from tests.golden import refused
from tests.secure_fed import small_models

# Clients with class shares that are unlikely to occur in any other tensor.
LABELS = ([0] * 5 + [1], [2] * 7 + [0] * 2, [1] * 7, [0, 1, 1, 2, 2, 2, 2, 2])
SHARE = [[5 / 6, 1 / 6, 0.0], [2 / 9, 0.0, 7 / 9], [0.0, 1.0, 0.0], [1 / 8, 2 / 8, 5 / 8]]
UNIFORM = torch.full((3,), 1 / 3)
OWN = {"method.class_shares": "client"}


def method(**more: Any) -> C2a:
    found = build(MethodConfig(name="c2a", context_dim=3, bottleneck=4, hyper_dim=5, **more))
    assert isinstance(found, C2a)
    return found


def start() -> State:
    model = small_models.make("bert")
    return State(method().prepare(model, small_models.head_of(model), 7))


def federation(**settings: Any) -> Federation:
    unit = settings.pop("unit", "none")
    how = settings.pop("how", "plain")
    train = []
    for client, labels in enumerate(LABELS):
        items = runs.examples(client + 1, len(labels))
        train.append([{**item, "labels": label} for item, label in zip(items, labels, strict=True)])
    config = runs.settings("c2a", unit, how, **settings)
    return Federation(config, model=runs.model(), train=train, test=runs.examples(99, 12))


def test_the_shares_are_in_the_state_and_travel_neither_way() -> None:
    state = start()
    plan = method().plan(state)
    assert set(plan.trainable) == set(plan.down) == set(state.tensors) - {SHARES}
    assert method().layout(state, CHANGE) == Layout.of(state.tensors.without([SHARES]))
    assert torch.equal(state.tensors.tensor(SHARES), UNIFORM)


def test_the_context_is_the_clients_class_shares() -> None:
    initial, own = start().tensors, method(class_shares="client")
    assert isinstance(own, Contextual)
    for labels, share in zip(LABELS, SHARE, strict=True):
        items = [{"input_ids": [1], "labels": label} for label in labels]
        for named in (items, [{"input_ids": [1], "label": item["labels"]} for item in items]):
            found = own.context(initial, named)
            assert list(found) == [SHARES]
            assert found.tensor(SHARES).tolist() == pytest.approx(share)
    encoded = Encoded({"input_ids": tuple(torch.ones(2).int().numpy() for _ in LABELS[0]), "labels": tuple(LABELS[0])})
    assert own.context(initial, encoded).tensor(SHARES).tolist() == pytest.approx(SHARE[0])
    assert not method().context(initial, encoded)  # the state's uniform shares stay


@every("examples", [[], [{"input_ids": [1, 2]}], [{"labels": [0, 1]}, {"labels": [2]}], [(torch.ones(2), 1)]])
def test_without_class_labels_the_context_is_uniform(examples: list[Any]) -> None:
    found = method(class_shares="client").context(start().tensors, examples)
    assert torch.equal(found.tensor(SHARES), UNIFORM)


def shares_in(losses: list[Tensor]) -> set[tuple[float, ...]]:
    return {tuple(round(float(number), 5) for number in one) for one in losses}


@pytest.mark.parametrize("own", [True, False])
def test_clients_train_with_their_own_shares_if_asked_to_and_are_evaluated_with_none(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = federation(**(OWN if own else {}))
    seen: list[Tensor] = []
    holding = built.assembly.objective.holding

    def watched(tensors: Any) -> Any:
        seen.append(tensors[SHARES].clone())
        return holding(tensors)

    monkeypatch.setattr(built.assembly.objective, "holding", watched)
    evaluated: list[Tensor] = []
    metrics = built.assembly.problem.metrics

    def measured(model: Any, batches: Any) -> dict[str, float]:
        evaluated.append(model.get_parameter(SHARES).detach().clone())
        return metrics(model, batches)

    object.__setattr__(built.assembly.problem, "metrics", measured)
    result = built.run()
    assert shares_in(seen) == (shares_in([torch.tensor(share) for share in SHARE]) if own else {(0.33333,) * 3})
    assert shares_in(evaluated) == {(0.33333,) * 3}
    assert torch.equal(result.state.tensors.tensor(SHARES), UNIFORM)


def travelling(built: Federation) -> Iterator[tuple[str, Tensor]]:
    """The name and value of every tensor that a run sent in either direction."""
    events = runs.watch(built)
    built.run()
    for replies in events.replies.values():
        for reply in replies.values():
            yield from reply.contribution.parts().items()
    for requests in events.requests.values():
        for request in requests.values():
            yield from request.tensors.parts().items()
            for mean in request.means.values():
                yield from mean.parts().items()


def has_shares(tensor: Tensor) -> bool:
    """Whether three neighbouring numbers are a client's shares, or their difference from uniform ones."""
    rows = tensor.reshape(-1, 3) if tensor.numel() % 3 == 0 else tensor.new_empty(0, 3)
    known = [torch.tensor(share) - base for share in SHARE for base in (0, 1 / 3)]
    return any(bool(torch.isclose(rows, wanted, atol=1e-6).all(1).any()) for wanted in known)


@pytest.mark.parametrize(
    ("unit", "how"),
    chosen(itertools.product(["none", "client"], ["plain", "masked"]), [("none", "plain")]),
)
def test_no_clients_shares_are_in_anything_that_travels(unit: str, how: str) -> None:
    found = list(travelling(federation(unit=unit, how=how, **OWN)))
    assert len(found) > 100
    assert not [name for name, tensor in found if "class_shares" in name or has_shares(tensor)]
    assert has_shares(torch.cat([torch.zeros(3), torch.tensor(SHARE[0])])), "the search would find them"


@pytest.mark.nightly
@pytest.mark.parametrize("coupling", [OWN, {"method.context": "batch"}])
def test_examples_are_protected_unless_a_setting_couples_them(coupling: dict[str, str]) -> None:
    assert federation(unit="example").run().summary["unit"] == "example"
    with refused(ConfigError):
        federation(unit="example", **coupling)
