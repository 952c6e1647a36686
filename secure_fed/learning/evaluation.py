"""How well a model does: metrics over examples, the agreement of written answers with references, and the fit of an example.

`evaluate` computes a task's metrics over examples in batches. With `evaluation.generate` a model also writes answers to test
rows (`Asked`), and `agreement` compares each with the row's reference: a number from 0 to 1, by the names of `data.metric`.
`confidence` is how well a model fits one example, on a scale for membership attacks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from secure_fed.activity import activity
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, DataError, ModelError
from secure_fed.learning.data.encode import batches
from secure_fed.learning.data.rows import Rows
from secure_fed.learning.generation import generated, prompt_room
from secure_fed.learning.tasks import classification
from secure_fed.learning.tasks.causal_lm import CausalLM
from secure_fed.learning.tasks.next_tokens import rows_together
from secure_fed.learning.tasks.question_answering import best_f1
from secure_fed.learning.tasks.task import Collate, Confidence, Loss, Metrics, Task
from secure_fed.learning.training.objective import to_device

Agreement = Callable[[str, str], float]  # the answer, and the reference
_WORD = re.compile(r"\w+")
_TINY = torch.finfo(torch.float32).eps ** 2  # the least 1 - p, for a p that is 1 in float32


@torch.no_grad()
def evaluate(
    model: nn.Module, examples: Sequence[Any], collate: Collate, metrics: Metrics, batch_size: int, device: torch.device
) -> dict[str, float]:
    """The metrics of the model, in evaluation mode, over all examples, as plain numbers."""
    if model.training:  # `eval` visits every module, which is slow
        model.eval()
    read = batches(examples, batch_size, collate, None)
    with activity("evaluating in batches", -(-len(examples) // batch_size)) as now:

        def made() -> Iterator[Any]:
            for batch in read:
                now.step()
                yield to_device(batch.inputs, device)

        with rows_together():
            given: Any = metrics(model, made())
    try:
        return {str(name): float(value) for name, value in given.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError) as error:
        message = f"metrics must give a dict of names and numbers, and gave {given!r:.80}"
        raise ConfigError(message).about("metrics", given, "a dict of names and numbers") from error


@dataclass(frozen=True)
class Asked:
    """The test rows that are answered in a measured round."""

    task: CausalLM
    rows: Rows
    config: RunConfig

    def room(self, model: nn.Module) -> int:
        """The most tokens of a prompt; ConfigError if answers leave no room for any."""
        settings = self.config.evaluation
        return prompt_room(model, self.config.model.max_length, settings.max_new_tokens, "evaluation.max_new_tokens")

    def measured(self, model: nn.Module, tokenizer: Any) -> dict[str, float]:
        """The mean over the rows of `data.metric`, by its name; not-a-number for a model whose scores are not finite."""
        data, settings = self.config.data, self.config.evaluation
        agrees = agreement(data.metric, data.answer_pattern)
        most = settings.max_new_tokens
        try:
            found = answers(
                self.task, model, tokenizer, self.rows, self.room(model), most, batch_size=settings.batch_size
            )
        except ModelError:
            return {data.metric: math.nan}
        return {data.metric: float(np.mean(list(map(agrees, found, self.task.references(self.rows)))))}


def asked(config: RunConfig, task: Task, test: Rows) -> Asked | None:
    """The rows of `evaluation.generate`, spread evenly over the test set; None if it is 0.

    DataError if `data.answer_pattern` matches in none of the test set's references.
    """
    count = min(config.evaluation.generate, len(test))
    if not count:
        return None
    writes = cast(CausalLM, task)  # other tasks are refused with evaluation.generate
    references, pattern = writes.references(test), config.data.answer_pattern
    if all(picked(text, pattern) is None for text in references):
        raise DataError(
            f"data.answer_pattern is {pattern!r}, which matches in none of the {len(references)} test rows' "
            "targets, so no answer could be right: correct it"
        ).about("data.answer_pattern", pattern, "a pattern that matches in the targets")
    return Asked(writes, test.take(index * len(test) // count for index in range(count)), config)


def answers(
    task: CausalLM, model: nn.Module, tokenizer: Any, rows: Rows, length: int, new: int, **how: Any
) -> list[str]:
    """The text that the model writes after each row's prompt of at most `length` tokens, without special tokens.

    new: the most tokens of an answer. how: further arguments of `generated`.
    """
    written = generated(model, task.prompts(tokenizer, rows, length), new, stops=task.stops(tokenizer), **how)
    return [str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in written]


def agreement(metric: str, pattern: str = "") -> Agreement:
    """The metric of this name. pattern: of `exact_match`, see `picked`."""
    if metric == "exact_match":
        return lambda answer, reference: exact_match(answer, reference, pattern)
    return {"f1": f1, "rouge_l": rouge_l}[metric]


def exact_match(answer: str, reference: str, pattern: str = "") -> float:
    """1 if both are the same text, else 0, without regard to case and to the amount of white space.

    pattern: picks what is compared out of both; a text without a match agrees with none.
    """
    found = [_plain(one) if (one := picked(text, pattern)) is not None else None for text in (answer, reference)]
    return float(found[0] is not None and found[0] == found[1])


def picked(text: str, pattern: str) -> str | None:
    """The first group of the first match of the pattern, or the whole match of a pattern without groups; None without a match.

    An empty pattern picks the whole text.
    """
    if not pattern:
        return text
    found = re.search(pattern, text)
    return found and (found[1] or "" if found.re.groups else found[0])


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def f1(answer: str, reference: str) -> float:
    """F1 of the words, normalised as in SQuAD: without case, punctuation and articles; a word counts as often as it occurs."""
    return best_f1(answer, [reference])


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words (Lin, 2004, ROUGE), without case and punctuation, and without stemming.

    With L its length, m and n the numbers of words: precision L / m, recall L / n, so 2 L / (m + n).
    """
    own, other = (_WORD.findall(text.casefold()) for text in (answer, reference))
    return 2 * _common(own, other) / (len(own) + len(other)) if own and other else float(own == other)


def _common(one: Sequence[str], other: Sequence[str]) -> int:
    """The length of the longest common subsequence."""
    before = [0] * (len(other) + 1)  # of the words of `one` so far and each beginning of `other`
    for word in one:
        row = [0]
        for at, theirs in enumerate(other):
            row.append(before[at] + 1 if word == theirs else max(before[at + 1], row[at]))
        before = row
    return before[-1]


def confidence(task: str, loss: Loss) -> Confidence:
    """phi(model, batch) -> (B,), how well a model fits each example: higher is better.

        phi = log p_y - log sum over c != y of p_c                        for classes, in float64 from the scores
        phi = log p - log (1 - p), p = exp(mean log-probability)         for texts, tags, sets of labels, answers and choices
        phi = -loss                                                       for regression, and a user's own loss

    The first two are the logit of a probability, whose distribution over models is far closer to normal than the distribution
    of the probability or of the loss (Carlini et al. 2022, arXiv 2112.03570, section IV-C). The first is exact where a
    probability in float32 would round to 1.

    task: named as in `data.task`; "" is a user's own loss.
    """
    if task == "classification" or loss is classification.loss:
        return lambda model, batch: confidence_of_classes(classification.logits(model, batch), batch["labels"])
    if task in ("", "regression"):
        return lambda model, batch: -loss(model, batch).double()
    return lambda model, batch: confidence_of_likelihood(-loss(model, batch))


def confidence_of_classes(scores: Tensor, labels: Tensor) -> Tensor:
    """(B,) float64 logits of the probability of `labels`, from scores (B, classes)."""
    scores = scores.double()
    own = scores.gather(1, labels[:, None])
    others = scores.scatter(1, labels[:, None], -torch.inf)
    return own.squeeze(1) - others.logsumexp(1)


def confidence_of_likelihood(log_probability: Tensor) -> Tensor:
    """(B,) float64 logits of exp(log_probability)."""
    log_p = log_probability.double().clamp(max=0.0)
    return log_p - torch.log((-torch.expm1(log_p)).clamp(min=_TINY))
