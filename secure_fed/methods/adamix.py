"""AdaMix (Wang et al., 2022, arXiv 2205.12410): several bottlenecks behind every feed-forward, of which each pass of training
takes one at random (section 3.1), and which are merged into their mean otherwise (section 3.3).

    local loss of an example i = loss_i(a) + 1/2 (KL(p_a || p_b) + KL(p_b || p_a))
                               = loss_i(a) + 1/2 sum_c (p_a - p_b)_c (log p_a - log p_b)_c                        (section 3.2)

with loss_i the task's loss, a and b two passes, each with its own random choice of experts, and p their predicted distribution:

    classification      over the classes
    multi_label         for each label, its presence; the divergence is the mean over labels, like the loss
    regression          a normal of variance one around the prediction: half of the squared difference
    tokens              over the tags, the mean over words that have one
    causal_lm, chat     over the next token, the mean over tokens that are learned; multiple_choice too, on the right choice
    question_answering  over the positions of the start and of the end, the sum of both

The experts of a place share their upper layer (section 3.4), as in the authors' settings, so there are M lower layers. All are
averaged, expert by expert.

Guarantee: the mean of the parameters is exact. Experts are drawn for a whole pass, independently of its examples. For
example-level privacy each example has its own pass (`passes.tried`): with a shared draw, the examples that share it
would depend on the other examples.

Deviations. The upper layers start at zero, so that the adapted model starts equal to the original. Clients send experts
unmerged: they are merged where the model is used, so that experts stay different over the rounds. The paper has
classification and text generation; the other tasks are ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from secure_fed.config import RunConfig
from secure_fed.errors import MethodError
from secure_fed.learning.data.encode import IGNORED
from secure_fed.learning.models.adapters.inserted import Mixtures, routes
from secure_fed.learning.tasks.task import Loss
from secure_fed.methods.averaged import Averaged
from secure_fed.methods.method import Card

CARD = Card(
    name="adamix",
    paper="Wang et al., arXiv 2205.12410",
    travels="the experts' down, shared up, head",
    mean_exact=True,
    options=("bottleneck", "experts"),
)


def build(run: RunConfig) -> AdaMix:
    return AdaMix(Mixtures(run.method.bottleneck or 16, run.method.experts), CARD, run.data.task)


@dataclass(frozen=True)
class AdaMix(Averaged):
    """Averages the experts and the head; the loss makes two random passes agree."""

    task: str = "classification"

    def objective(self, loss: Loss) -> Loss:
        return consistent(loss, self.task)


def consistent(loss: Loss, task: str = "classification") -> Loss:
    """The loss (model, batch) -> (B,) of two passes; of one pass if passes are not random, since two would agree."""
    divergence = DIVERGENCES[task]

    def of_two(model: nn.Module, batch: Any) -> Tensor:
        if not routes(model):
            return loss(model, batch)
        losses, first = _watched(loss, model, batch)
        _, second = _watched(loss, model, batch)
        apart = divergence(first, second, batch)
        # A loss of another shape is not broadcast over the examples: it is returned unchanged, and refused later.
        return losses + apart if losses.shape == apart.shape else losses

    return of_two


def of_classes(first: Any, second: Any, batch: Any) -> Tensor:
    return _apart(*_scores(first, second, 2))


def of_labels(first: Any, second: Any, batch: Any) -> Tensor:
    a, b = _scores(first, second, 2)
    return ((a.sigmoid() - b.sigmoid()) * (a - b)).mean(1) / 2


def of_numbers(first: Any, second: Any, batch: Any) -> Tensor:
    a, b = _scores(first, second, 2)
    return (a - b).square().sum(1) / 2


def of_tags(first: Any, second: Any, batch: Any) -> Tensor:
    return _mean_where(_apart(*_scores(first, second, 3)), batch["labels"] != IGNORED)


def of_next_tokens(first: Any, second: Any, batch: Any) -> Tensor:
    a, b = _scores(first, second, 3)
    return _mean_where(_apart(a[:, :-1], b[:, :-1]), batch["labels"][:, 1:] != IGNORED)


def of_spans(first: Any, second: Any, batch: Any) -> Tensor:
    blind, ends = batch["attention_mask"] == 0, ("start_logits", "end_logits")
    seen = [[getattr(output, end).float().masked_fill(blind, -1e9) for end in ends] for output in (first, second)]
    return _apart(seen[0][0], seen[1][0]) + _apart(seen[0][1], seen[1][1])


# (outputs of two passes, batch) -> (B,), by data.task.
DIVERGENCES: dict[str, Callable[[Any, Any, Any], Tensor]] = {
    "classification": of_classes,
    "multi_label": of_labels,
    "regression": of_numbers,
    "tokens": of_tags,
    "question_answering": of_spans,
    "causal_lm": of_next_tokens,
    "chat": of_next_tokens,
    "multiple_choice": of_next_tokens,
}


def _scores(first: Any, second: Any, dims: int) -> tuple[Tensor, Tensor]:
    """Both outputs' scores in float32, (B, classes) or (B, tokens, classes)."""
    a, b = (getattr(output, "logits", output) for output in (first, second))
    if not isinstance(a, Tensor) or a.ndim != dims:
        shape = "(examples, classes)" if dims == 2 else "(examples, tokens, classes)"
        raise MethodError(
            f"adamix compares the scores of two passes, and the model gives a {type(first).__name__} without scores of shape "
            f"{shape}: choose a method that trains on the task's loss alone"
        )
    return a.float(), b.float()


def _apart(a: Tensor, b: Tensor) -> Tensor:
    """1/2 sum (p_a - p_b)(log p_a - log p_b) over the last dimension."""
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    return ((log_a.exp() - log_b.exp()) * (log_a - log_b)).sum(-1) / 2


def _mean_where(apart: Tensor, counts: Tensor) -> Tensor:
    """(B,) means over the counted tokens; 0 for an example without any."""
    return (apart * counts).sum(1) / counts.sum(1).clamp(min=1)


def _watched(loss: Loss, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
    """The loss, and the model's output from which it was computed."""
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda model, args, output: outputs.append(output))
    try:
        losses = loss(model, batch)
    finally:
        hook.remove()
    if len(outputs) != 1:
        raise MethodError(
            f"adamix compares the scores of two passes, and the loss calls the model {len(outputs)} times instead of once: "
            "give a loss with one call, or choose a method that trains on the task's loss alone"
        )
    return losses, outputs[0]
