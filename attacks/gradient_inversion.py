"""Texts recovered from one client's update, as a server without secure aggregation sees it.

The exact test (`attacks.texts.span`) is applied to some clients' updates of a few rounds, one round at a time and then
together. A client's inputs stay the same over rounds while its gradients differ, so the rows of r rounds span more of the
inputs: small ranks do not protect a client that trains on the same few texts again. One local step of AdamW is undone first.
Where the test does not apply, `guessed` contains the candidates nearest to the row space; with `training.batch_size` and
`training.steps` at 1 and SGD, the texts of clients with a single short text are also recovered by optimisation (`match`).
Beside the means over updates stand the figures of the most exposed one, because a mean hides a client whose texts were all
recovered.

A client's texts are read only for scoring. They are all of its texts: if a client trains on a part of them in a round, recall
is below 1 even if that whole part was recovered. Special and padding tokens do not count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.texts.recovery import NO_FACTORS, PriorKnowledge, mean, means, prior_knowledge, score
from secure_fed.learning.data.rows import places_of
from secure_fed.runs.recording import Update

NOTHING = "the exact test applies to none of the {count} {what} looked at, and nothing could be guessed ({why})"
ROUNDS, CLIENTS, MATCHED = 3, 5, 3
_MATCHED_TOKENS = 24
_NOTE = "words are distinct tokens, places pairs of position and token; special tokens left out"
PULL = 0.1


def run(case: Case, settings: Settings) -> Finding:
    """Recall and precision over the attacked updates."""
    if not case.seen.updates:
        raise Inapplicable("inverting updates needs the updates of single clients: set evaluation.record = 'updates'")
    at = prior_knowledge(case)
    updates = picked(case, settings)
    found = at.recovered([[at.sent(one)] for one in updates])
    if all(one.why == NO_FACTORS for one in found):
        raise Inapplicable(f"{NO_FACTORS}; there is nothing to test inputs against")
    rows = [
        {"round": one.round, "client": one.client, **at.scored(recovery, [one.client])}
        for one, recovery in zip(updates, found, strict=True)
    ]
    measured = {**means(rows), "all_rounds": _together(at, updates), "per_update": rows}
    failed = [one for one, recovery in zip(updates, found, strict=True) if not recovery.applies]
    if matched := _matched(at, failed):
        measured["matching"] = matched
    elif named_nothing(measured) and named_nothing(measured["all_rounds"] or measured):
        raise Inapplicable(NOTHING.format(count=len(rows), what="updates", why=measured["why_not"][0]))
    return Finding(measured=measured, note=_NOTE)


def picked(case: Case, settings: Settings) -> list[Update]:
    """A few clients' updates of the first rounds they took part in."""
    usable = [one for one in case.seen.updates if one.round in case.seen.states]
    clients = list(dict.fromkeys(one.client for one in usable))[:CLIENTS]
    most = min(settings.max_rounds or ROUNDS, ROUNDS)
    chosen: list[Update] = []
    for client in clients:
        own = [one for one in usable if one.client == client]
        rounds = sorted({one.round for one in own})[:most]
        last = {one.round: one.pass_name for one in own}  # carries the changes, after any pass with a sketch of them
        chosen += [one for one in own if one.round in rounds and one.pass_name == last[one.round]]
    return chosen


def named_nothing(row: Mapping[str, Any]) -> bool:
    """Whether the exact test applied nowhere and nothing was guessed: then shares of 0 are not a finding."""
    return row["exact_applicable"] == 0 and row["guessed_precision"] is row["guessed_bag_precision"] is None


def _together(at: PriorKnowledge, updates: Sequence[Update]) -> dict[str, Any] | None:
    """The picked rounds of each client at once, for clients seen in several of them."""
    groups = places_of(one.client for one in updates)
    several = {client: [updates[place] for place in own] for client, own in groups.items() if len(own) > 1}
    if not several:
        return None
    found = at.recovered([[at.sent(one) for one in own] for own in several.values()])
    return means([{"client": client, **at.scored(one, [client])} for client, one in zip(several, found, strict=True)])


def _matched(at: PriorKnowledge, updates: Sequence[Update]) -> dict[str, Any] | None:
    """Recall of tokens by optimisation, and the recall of naming equally many of the commonest tokens of public texts."""
    from secure_fed.learning.tasks import classification

    training, parts = at.case.assembly.config.training, at.case.assembly.problem
    plain = training.optimizer == "sgd" and training.batch == 1 and training.steps == 1
    short = at.length <= _MATCHED_TOKENS and parts.loss is classification.loss
    if not (plain and short and at.case.assembly.objective.device.type == "cpu"):
        return None
    named = dict(zip(parts.names, parts.train, strict=True))
    scores, usual = [], []
    for one in [one for one in updates if len(named[one.client]) == 1][:MATCHED]:
        found, truth = {(-1, token) for token in _matched_text(at, one)}, at.truth([one.client])
        scores.append(score(found, truth, at.special))
        usual.append(at.common.beside(found, truth, at.special)[1])
    if not scores:
        return None
    return {
        "updates": len(scores),
        "bag_recall": mean([one.bag_recall for one in scores]),
        "bag_precision": mean([one.bag_precision for one in scores if one.bag_precision is not None]),
        "baseline": mean(usual),
    }


def _matched_text(at: PriorKnowledge, one: Update) -> list[int]:
    """The label is the class whose bias the step raised most: its gradient alone is negative."""
    before = at.before(one.round)
    model = at.case.assembly.objective.load(before).eval()
    change = {name: one.contribution.tensor(name) for name in one.contribution if name in before}
    bias = [name for name in at.case.assembly.problem.head if name.endswith("bias") and name in change]
    label = int(change[bias[-1]].argmax()) if bias else 0
    start = {name: before.tensor(name) for name in before}
    return match(model, start, change, at.length, label)


@dataclass(frozen=True)
class Budget:
    """The effort of a search: the number of starts, and of steps for each."""

    starts: int = 2
    steps: int = 150
    lr: float = 0.15
    seed: int = 0


def match(
    model: nn.Module, trained: Mapping[str, Tensor], update: Mapping[str, Tensor], length: int, label: int
) -> list[int]:
    """The tokens of one text of that length and label whose gradient step is most similar to the update.

    Dummy embeddings are fitted until their gradient points in the direction of the update, as in LAMP (Balunović et al. 2022)
    and its forerunners, without their language-model prior: embeddings e (L, n) of one text minimise

        1 - cos(g(e), -update) + PULL mean_i (|e_i| - mean |embedding|)^2

    (cos: the mean of the cosines of all tensors) with Adam, keeping the best of a few random starts; each position then takes
    the nearest token. Attention must be differentiable twice, so its plain kernel is used. This is far weaker than the exact
    test: it recovers short texts, one at a time, and mostly loses the order of tokens.

    trained: the trained tensors before the step. update: their change by the step. model: a classifier whose
    `get_input_embeddings()` is a table of tokens.
    """
    budget, table = Budget(), model.get_input_embeddings().weight.detach()  # type: ignore[operator]
    names = [name for name in trained if name in update and bool(update[name].any())]
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in trained.items()}
    loss = _loss(model, leaves, label)
    target = [-update[name].to(table.dtype) for name in names]
    generator = torch.Generator().manual_seed(budget.seed)
    own = [leaves[name] for name in names]
    starts = [torch.randint(len(table), (length,), generator=generator) for _ in range(budget.starts)]  # valid texts
    ended = [_optimised(loss, own, target, table[start].clone(), table, budget) for start in starts]
    best, _ = min(ended, key=lambda one: one[1])
    far = torch.cdist(F.normalize(best, dim=1), F.normalize(table, dim=1))
    return [int(token) for token in far.argmin(1)]


def _loss(model: nn.Module, leaves: Mapping[str, Tensor], label: int) -> Callable[[Tensor], Tensor]:
    """The loss of one text given by its embeddings (L, n)."""
    embeddings: nn.Module = model.get_input_embeddings()  # type: ignore[operator]

    def loss(dummy: Tensor) -> Tensor:
        ids = torch.ones(1, len(dummy), dtype=torch.long)
        with embeddings.register_forward_hook(lambda module, args, output: dummy[None]):
            out: Any = functional_call(model, dict(leaves), kwargs={"input_ids": ids, "attention_mask": ids})
        return F.cross_entropy(getattr(out, "logits", out), torch.tensor([label]))

    return loss


def _optimised(
    loss: Callable[[Tensor], Tensor],
    leaves: Sequence[Tensor],
    target: Sequence[Tensor],
    start: Tensor,
    table: Tensor,
    budget: Budget,
) -> tuple[Tensor, float]:
    """The optimised embeddings, and the final distance of their gradient from the update."""
    dummy = start.requires_grad_()
    optimizer = torch.optim.Adam([dummy], budget.lr)
    usual, value = table.norm(dim=1).mean(), 2.0
    for step in range(budget.steps):
        optimizer.param_groups[0]["lr"] = budget.lr * (1 - step / budget.steps)
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            gradients = torch.autograd.grad(loss(dummy), leaves, create_graph=True)
            pairs = zip(gradients, target, strict=True)  # a mean over tensors, so that large ones do not dominate
            apart = 1 - torch.stack([F.cosine_similarity(f.flatten(), t.flatten(), dim=0) for f, t in pairs]).mean()
            (apart + PULL * (dummy.norm(dim=1) - usual).square().mean()).backward()
        optimizer.step()
        value = float(apart.detach())
    return dummy.detach(), value


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("gradient_inversion"))
