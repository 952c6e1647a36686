"""AdaMix's consistency loss of two passes, against Kullback-Leibler divergences computed term by term."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from secure_fed.errors import ConfigError, MethodError
from secure_fed.learning.tasks import TASKS, classification
from secure_fed.learning.training.objective import Objective
from secure_fed.methods.adamix import (
    DIVERGENCES,
    consistent,
    of_classes,
    of_labels,
    of_next_tokens,
    of_numbers,
    of_spans,
    of_tags,
)
from secure_fed.methods.method import OwnObjective
from tests.golden import refused
from tests.secure_fed.methods.rounds import method_of


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def both(a: Tensor, b: Tensor) -> float:
    p, q = ([math.exp(x) / sum(map(math.exp, row)) for x in row] for row in (a.tolist(), b.tolist()))
    return (kl(p, q) + kl(q, p)) / 2


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


A, B = drawn(4, 3), drawn(4, 3, seed=1)
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])


class Wavering(nn.Module):
    """A model that returns the next of the given outputs at every forward pass."""

    def __init__(self, *outputs: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.outputs, self.passes = outputs, 0

    def forward(self, x: Tensor) -> Any:
        output = self.outputs[self.passes % len(self.outputs)]
        self.passes += 1
        return output * self.scale if isinstance(output, Tensor) else output


def batch(size: int = 4) -> dict[str, Tensor]:
    return {"x": torch.zeros(size, 1), "labels": torch.arange(size) % 3}


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_loss_of_the_first_pass_and_how_far_the_second_is_from_it(wrapped: bool) -> None:
    outputs = [SimpleNamespace(logits=x) for x in (A, B)] if wrapped else [A, B]
    model = Wavering(*outputs)
    found = consistent(classification.loss)(model, batch())
    assert found.shape == (4,)
    assert model.passes == 2
    for i, loss in enumerate(found.tolist()):
        task = -math.log(math.exp(A[i, i % 3]) / sum(map(math.exp, A[i].tolist())))
        assert loss == pytest.approx(task + both(A[i], B[i]), rel=1e-5)


@pytest.mark.parametrize("how", ["evaluating", "without gradients"])
def test_where_nothing_is_random_there_is_one_pass(how: str) -> None:
    model = Wavering(A, B).train(how != "evaluating")
    with torch.set_grad_enabled(how == "evaluating"):
        found = consistent(classification.loss)(model, batch())
    assert model.passes == 1
    torch.testing.assert_close(found, classification.loss(Wavering(A), batch()))


def test_gradients_reach_both_passes() -> None:
    a, b = A.clone().requires_grad_(), B.clone().requires_grad_()
    of_classes(a, b, {}).sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.norm(dim=1) > 1e-3).all()
    assert (b.grad.norm(dim=1) > 1e-3).all()


NONE = -100


def test_tags_count_where_a_word_has_one() -> None:
    a, b = drawn(2, 4, 3), drawn(2, 4, 3, seed=1)
    labels = torch.tensor([[NONE, 1, NONE, NONE], [0, NONE, 2, 1]])
    counted = [(0, (1,)), (1, (0, 2, 3))]
    expected = [sum(both(a[i, t], b[i, t]) for t in places) / len(places) for i, places in counted]
    assert of_tags(a, b, {"labels": labels}).tolist() == pytest.approx(expected, rel=1e-5)
    assert of_tags(a, b, {"labels": torch.full((2, 4), NONE)}).tolist() == [0, 0]


def test_next_tokens_count_where_they_are_learned() -> None:
    """The scores at a position predict the next token; prompts and padding have no label."""
    a, b = drawn(1, 5, 3), drawn(1, 5, 3, seed=1)
    labels = torch.tensor([[NONE, NONE, 2, 0, NONE]])
    expected = (both(a[0, 1], b[0, 1]) + both(a[0, 2], b[0, 2])) / 2
    assert of_next_tokens(a, b, {"labels": labels}).tolist() == pytest.approx([expected], rel=1e-5)


def test_labels_and_numbers_are_compared_as_what_they_are() -> None:
    """Here a softmax would show no difference: all labels present against none, and two different predicted numbers."""
    high, low = torch.full((1, 3), 4.0), torch.full((1, 3), -4.0)
    p, q = 1 / (1 + math.exp(-4)), 1 / (1 + math.exp(4))
    one = (kl([p, 1 - p], [q, 1 - q]) + kl([q, 1 - q], [p, 1 - p])) / 2
    assert of_labels(high, low, {}).tolist() == pytest.approx([one], rel=1e-5)
    assert of_numbers(torch.tensor([[3.0]]), torch.tensor([[1.0]]), {}).tolist() == [2.0]
    assert of_classes(high, low, {}).tolist() == pytest.approx([0], abs=1e-6)


def test_every_task_has_its_own() -> None:
    assert set(DIVERGENCES) == set(TASKS)


def test_starts_and_ends_of_answers() -> None:
    starts, ends = drawn(2, 2, 4), drawn(2, 2, 4, seed=1)
    first, second = (SimpleNamespace(start_logits=starts[k], end_logits=ends[k]) for k in (0, 1))
    found = of_spans(first, second, {"attention_mask": MASK})
    expected = [
        both(starts[0, i, :n], starts[1, i, :n]) + both(ends[0, i, :n], ends[1, i, :n]) for i, n in enumerate((3, 4))
    ]
    assert found.tolist() == pytest.approx(expected, rel=1e-5)


def test_outputs_without_scores_and_a_loss_of_several_calls_are_refused() -> None:
    def twice(model: nn.Module, given: Any) -> Tensor:
        return classification.loss(model, given) + classification.loss(model, given)

    with refused(MethodError):
        of_classes((A,), (B,), {})
    with refused(MethodError):
        of_tags(A, B, {})
    with refused(MethodError):
        consistent(twice)(Wavering(A), batch())


def test_a_loss_that_is_no_examples_own_is_not_spread_over_them() -> None:
    found = consistent(lambda model, given: classification.loss(model, given).mean())(Wavering(A, B), batch())
    assert found.shape == ()


def test_no_hook_is_left_behind() -> None:
    model = Wavering(A, B)
    consistent(classification.loss)(model, batch())

    def failing(model: nn.Module, given: Any) -> Tensor:
        classification.loss(model, given)
        raise ConfigError("no")

    with pytest.raises(ConfigError):
        consistent(failing)(model, batch())
    assert not model._forward_hooks


def test_only_adamix_trains_on_it() -> None:
    method: Any = method_of("adamix")
    assert isinstance(method, OwnObjective)
    assert not isinstance(method_of("adapter_pfeiffer"), OwnObjective)
    objective = Objective(Wavering(A, B), method.objective(classification.loss), torch.device("cpu"))
    found = objective.losses(batch())
    torch.testing.assert_close(found, classification.loss(Wavering(A), batch()) + of_classes(A, B, {}))
