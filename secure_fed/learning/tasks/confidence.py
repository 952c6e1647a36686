"""How well a model fits an example, on a scale for membership attacks: higher is better.

    phi = log p_y - log sum over c != y of p_c                        for classes, in float64 from the scores
    phi = log p - log (1 - p), p = exp(mean log-probability)         for texts, tags, sets of labels, answers and choices
    phi = -loss                                                       for regression, and a user's own loss

The first two are the logit of a probability, whose distribution over models is far closer to normal than the distribution of
the probability or of the loss (Carlini et al. 2022, arXiv 2112.03570, section IV-C). The first is exact where a probability in
float32 would round to 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secure_fed.learning.tasks import classification
from secure_fed.learning.tasks.task import Confidence, Loss

_TINY = torch.finfo(torch.float32).eps ** 2  # the least 1 - p, for a p that is 1 in float32


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


def confidence(task: str, loss: Loss) -> Confidence:
    """phi(model, batch) -> (B,) for a task, named as in `data.task`; "" is a user's own loss."""
    if task == "classification" or loss is classification.loss:
        return lambda model, batch: confidence_of_classes(classification.logits(model, batch), batch["labels"])
    if task in ("", "regression"):
        return lambda model, batch: -loss(model, batch).double()
    return lambda model, batch: confidence_of_likelihood(-loss(model, batch))
