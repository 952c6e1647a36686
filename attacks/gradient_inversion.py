"""Texts recovered from one client's update, as a server without secure aggregation sees it.

The exact test (`span.py`) is applied to some clients' updates of a few rounds, one round at a time and then together. A
client's inputs stay the same over rounds while its gradients differ, so the rows of r rounds span more of the inputs: small
ranks do not protect a client that trains on the same few texts again. One local step of AdamW is undone first
(`adamw_step.py`). Where the test does not apply, `guessed` contains the candidates nearest to the row space; with
`training.batch_size` and `training.steps` at 1 and SGD, the texts of clients with a single short text are also recovered by
optimisation (`matching.py`). Beside the means over updates stand the figures of the most exposed one, because a mean hides a
client whose texts were all recovered.

A client's texts are read only for scoring. They are all of its texts: if a client trains on a part of them in a round, recall
is below 1 even if that whole part was recovered. Special and padding tokens do not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attacks.adversary.case import Case, Finding, Inapplicable, Settings
from attacks.texts.matching import Budget, match
from attacks.texts.prior_knowledge import PriorKnowledge, prior_knowledge
from attacks.texts.recovery import NO_FACTORS
from attacks.texts.token_scores import mean, means, score
from secure_fed.runs.recording import Update

NOTHING = "the exact test applies to none of the {count} {what} looked at, and nothing could be guessed ({why})"
ROUNDS, CLIENTS, MATCHED = 3, 5, 3
_MATCHED_TOKENS = 24
_NOTE = "words are distinct tokens, places pairs of position and token; special tokens left out"


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
        chosen += [one for one in own if one.round in rounds and one.pass_name == _last_pass(own, one.round)]
    return chosen


def _last_pass(own: Sequence[Update], round_: int) -> str:
    """The pass that carries the changes, after any pass with a sketch of them."""
    return [one.pass_name for one in own if one.round == round_][-1]


def named_nothing(row: Mapping[str, Any]) -> bool:
    """Whether the exact test applied nowhere and nothing was guessed: then shares of 0 are not a finding."""
    return row["exact_applicable"] == 0 and row["guessed_precision"] is row["guessed_bag_precision"] is None


def _together(at: PriorKnowledge, updates: Sequence[Update]) -> dict[str, Any] | None:
    """The picked rounds of each client at once, for clients seen in several of them."""
    clients = list(dict.fromkeys(one.client for one in updates))
    groups = {client: [one for one in updates if one.client == client] for client in clients}
    several = {client: own for client, own in groups.items() if len(own) > 1}
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
        found, truth = {(-1, token) for token in _match(at, one)}, at.truth([one.client])
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


def _match(at: PriorKnowledge, one: Update) -> list[int]:
    """The label is the class whose bias the step raised most: its gradient alone is negative."""
    before = at.before(one.round)
    model = at.case.assembly.objective.load(before).eval()
    change = {name: one.contribution.tensor(name) for name in one.contribution if name in before}
    bias = [name for name in at.case.assembly.problem.head if name.endswith("bias") and name in change]
    label = int(change[bias[-1]].argmax()) if bias else 0
    start = {name: before.tensor(name) for name in before}
    return match(model, start, change, at.length, label, Budget())


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("gradient_inversion"))
