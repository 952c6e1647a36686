"""The number of examples of each class at a client, from its change of the classifier's bias.

For softmax and cross-entropy the gradient at the bias is dL/db_c = mean(p_c) - n_c / B over the B examples of a step
(iDLG and LLG, Wainakh et al. 2022; iLRG, Ma et al. 2023, brings in the mean of p). A client that takes T steps of plain SGD
sends -lr T mean(dL/db), with a smaller effective T if the rate falls within the round, so

    shares_c = n_c / B = mean(p_c) + change_c / (lr T)

with p_c the probability that the round's model gives class c on public examples. This is exact except for mean(p_c), which
differs between the client's and public examples, and changes over the T steps. The attack does not apply where the change is
another: under AdamW, whose first steps change every entry by about the same amount; with momentum or weight decay; where an
unknown factor shortens the update (`privacy.clip_norm`) or its steps (`training.max_grad_norm`); and with FedProx
(`training.proximal`), which pulls every step after the first back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.adversary.null import Floats
from secure_fed.learning.training.local import Falling, planned_steps
from secure_fed.runs.recording import Update

MOST_UPDATES, MOST_EXAMPLES = 60, 1000
_NOTE = (
    "distance of label shares from the true ones, 0 to 2; the baseline guesses the population's shares for every client"
)


def shares(change: Floats, mean_probability: Floats, lr: float, steps: float) -> Floats:
    """(classes,) each class's share of the batch: at least 0, adding up to 1.

    change: of the bias. mean_probability: of the classes, over examples like the client's, under the model that the client
    started from.
    """
    raw = mean_probability + change / (lr * steps)
    positive = np.clip(raw, 0.0, None)
    total = float(positive.sum())
    return positive / total if total > 0 else np.full(len(raw), 1 / len(raw))


def l1(found: Floats, true: Floats) -> float:
    """The L1 distance, between 0 and 2: twice the share of labels that are wrong."""
    return float(np.abs(found - true).sum())


def run(case: Case, settings: Settings) -> Finding:
    """Compare with the clients' true labels, for scoring; the baseline guesses the population's shares for every client."""
    bias = _bias(case)
    updates, config = _chosen(case, bias, settings), case.assembly.config
    classes = case.assembly.initial.tensors.tensor(bias).shape[0]
    population = _label_shares(case.population, classes)
    probabilities = {round_: _mean_probability(case, round_) for round_ in {update.round for update in updates}}
    named = dict(zip(case.assembly.problem.names, case.assembly.problem.train, strict=True))
    errors, usual = [], []
    for update in updates:
        own = named[update.client]
        change = np.asarray(update.contribution.tensor(bias).double())
        rate = case.seen.lr[update.round]
        if bias in case.assembly.problem.last:
            rate *= config.training.head_times
        falling = Falling(config.training, update.round, config.federation.rounds)
        # an attacker knows the number from the settings, or learns the client's size elsewhere
        steps = falling.as_long(planned_steps(max(1, len(own)), config.training))
        found = shares(change, probabilities[update.round], rate, steps)
        true = _label_shares(own, classes)
        errors.append(l1(found, true))
        usual.append(l1(population, true))
    measured: dict[str, Any] = {
        "l1_error": float(np.mean(errors)),
        "baseline_l1": float(np.mean(usual)),
        "clients": len({update.client for update in updates}),
        "updates": len(updates),
    }
    return Finding(measured=measured, note=_NOTE)


def _bias(case: Case) -> str:
    """The name of the classifier's bias. Inapplicable if there is none to read."""
    _require_known_steps(case)
    initial = case.assembly.initial.tensors
    found = [name for name in case.assembly.problem.head if name.endswith("bias") and name in initial]
    labels = _labels(case.population)
    if not labels or not found:
        raise Inapplicable("label counts need a classifier whose bias is sent, with one whole-number label an example")
    scores = _mean_probability(case, 0)
    if scores.ndim != 1 or len(scores) <= max(labels) or min(labels) < 0:
        raise Inapplicable(f"label counts need one score of each class, and labels up to {max(labels)} have none")
    for name in reversed(found):
        if initial[name].shape == scores.shape:
            return name
    raise Inapplicable(f"label counts need a bias of {len(scores)} classes in the head, and there is none")


def _require_known_steps(case: Case) -> None:
    """Refuse updates that are not SGD steps of known length on the plain cross-entropy."""
    from secure_fed.learning.tasks import classification

    config = case.assembly.config
    training = config.training
    if training.optimizer != "sgd" or training.momentum or training.weight_decay:
        raise Inapplicable(
            "label counts need plain SGD: AdamW, momentum and weight decay make other steps than the gradient's"
        )
    if case.assembly.protection.placement.private:
        raise Inapplicable("label counts need updates of known length, and these are clipped to privacy.clip_norm")
    if training.max_grad_norm is not None:
        raise Inapplicable(
            "label counts need steps of known length, and an unknown factor shortens these: training.max_grad_norm is "
            f"{training.max_grad_norm:g}; leave it out to measure them"
        )
    if training.proximal:
        raise Inapplicable(
            f"label counts need steps of the gradient alone, and training.proximal is {training.proximal:g}: set it to 0 to "
            "measure them"
        )
    if config.data.class_priors:
        raise Inapplicable("label counts need the plain cross-entropy, and data.class_priors weighs it")
    if case.assembly.problem.loss is not classification.loss:
        raise Inapplicable("label counts need the cross-entropy of a classifier, and the loss here is another")


def _chosen(case: Case, bias: str, settings: Settings) -> list[Update]:
    """Some updates of the first rounds, in their order of arrival; the model is least confident there."""
    if not case.seen.updates:
        raise Inapplicable("label counts need the updates of single clients: set evaluation.record = 'updates'")
    seen = [one for one in case.seen.updates if bias in one.contribution and one.round in case.seen.states]
    if not seen:
        raise Inapplicable(f"label counts need a bias that is sent, and {bias} stays on the client")
    rounds = sorted({one.round for one in seen})[: settings.max_rounds]
    return [one for one in seen if one.round in rounds][:MOST_UPDATES]


def _mean_probability(case: Case, round_: int) -> Floats:
    """(classes,) the mean probability of each class on public examples, under the model of that round."""
    import torch

    from secure_fed.learning.data.encode import batches
    from secure_fed.learning.tasks.classification import logits
    from secure_fed.learning.training.objective import to_device

    assembly, public = case.assembly, case.from_population(MOST_EXAMPLES)
    model = assembly.objective.load(case.seen.states.get(round_, assembly.initial.tensors))
    training, size = model.training, assembly.config.evaluation.batch_size
    model.eval()
    sums = []
    with torch.no_grad():
        for batch in batches(public, size, assembly.problem.collate, None):
            inputs = to_device(batch.inputs, assembly.objective.device)
            sums.append(logits(model, inputs).double().softmax(1).sum(0))
    model.train(training)
    return np.asarray((torch.stack(sums).sum(0) / len(public)).cpu())


def _labels(examples: Sequence[Any]) -> list[int]:
    """One integer label for each example; empty if labels are anything else."""
    every = [examples[index] for index in range(len(examples))]
    found = [np.asarray(one["labels"]) for one in every if isinstance(one, Mapping) and "labels" in one]
    if len(found) != len(every) or any(label.ndim or label.dtype.kind not in "iu" for label in found):
        return []
    return [int(label) for label in found]


def _label_shares(examples: Sequence[Any], classes: int) -> Floats:
    labels = _labels(examples)
    return np.bincount(labels, minlength=classes) / max(len(labels), 1)


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("label_counts"))
