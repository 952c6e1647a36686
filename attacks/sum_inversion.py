"""Texts recovered from the secure sum, and the recall by the size of the cohort.

A sum of updates is a sum of gradients: its rows are in the span of all clients' inputs. So the exact test works as for one
client with all of these texts, until they have more distinct inputs than the change has rows. The sum does not reveal which
client a text belongs to. Where single updates were recorded, the attack is made again as the server that reads them: it also
attacks sums over 1, 2, 5 and 10 of them (`by_cohort`), and the decrease of recall shows how much masks hide.

Recall is over the texts of the clients in a sum, if these are known: a server knows its cohort, and public coins let the scorer
draw it again. Otherwise recall is over the texts of all clients, and is bounded by the texts in the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attacks.adversary.case import Case, Finding, Inapplicable, Settings, summed
from attacks.gradient_inversion import NOTHING, ROUNDS, named_nothing
from attacks.texts.factor_changes import Sent
from attacks.texts.recovery import NO_FACTORS, PriorKnowledge, means, prior_knowledge
from secure_fed.runs.recording import Summed, Update

COHORTS = (1, 2, 5, 10)
REPEATS = 3
_NOTE = "of the texts of all clients of a sum; words are distinct tokens, places pairs of position and token"
_OF_MORE = "the clients of a sum are not known for certain, so recall is over the texts of more clients, and too low"


def run(case: Case, settings: Settings) -> Finding:
    """Recall over sums, compared with the texts of the clients in a sum if these are known."""
    if not case.seen.sums:
        raise Inapplicable("inverting sums needs the sums that the server decodes: set evaluation.record = 'updates'")
    at = prior_knowledge(case)
    # The sums of the first rounds, of the pass that carries changes.
    usable = {one.round: one for one in case.seen.sums if one.round in case.seen.states}
    sums = [usable[round_] for round_ in sorted(usable)[: min(settings.max_rounds or ROUNDS, ROUNDS)]]
    found = at.recovered([[at.summed(one)] for one in sums])
    if all(one.why == NO_FACTORS for one in found):
        raise Inapplicable(f"{NO_FACTORS}; there is nothing to test inputs against")
    cohorts = [_clients(case, one) for one in sums]
    rows = [
        {"round": one.round, "clients": one.clients, **at.scored(recovery, cohort)}
        for one, cohort, recovery in zip(sums, cohorts, found, strict=True)
    ]
    known = all(len(cohort) == one.clients for one, cohort in zip(sums, cohorts, strict=True))
    measured: dict[str, Any] = {**means(rows), "sums": len(rows), "cohorts_known": known, "per_sum": rows}
    if case.seen.updates:
        measured["by_cohort"] = _faded(at, case)
    if named_nothing(measured) and not any(measured.get("by_cohort", {}).values()):
        raise Inapplicable(NOTHING.format(count=len(rows), what="sums", why=measured["why_not"][0]))
    return Finding(measured=measured, note=_NOTE if known else f"{_NOTE}; {_OF_MORE}")


def _clients(case: Case, one: Summed) -> list[str]:
    """The clients whose texts may be in a sum, for scoring alone: the cohort if it can be drawn again, else all clients."""
    server = case.assembly.server
    if server.protection.hides_cohort:
        return list(server.names)
    return [server.names[index] for index in server.draw(one.round)]


def _faded(at: PriorKnowledge, case: Case) -> dict[str, float]:
    """Recall by the number of clients in a sum, at the recorded round whose change shows most factors: the second."""
    rounds = sorted({one.round for one in case.seen.updates if one.round in case.seen.states})
    round_ = rounds[min(1, len(rounds) - 1)]
    own = [one for one in case.seen.updates if one.round == round_]
    own = [one for one in own if one.pass_name == own[-1].pass_name]
    groups = {count: groups_of(own, count) for count in COHORTS if count <= len(own)}
    out = {}
    for count, chosen in groups.items():
        found = at.recovered([[_sent(at, group)] for group in chosen], count)
        rows = [at.scored(one, [update.client for update in group]) for one, group in zip(found, chosen, strict=True)]
        out[str(count)] = sum(row["recall"] for row in rows) / len(rows)
    return out


def groups_of(updates: Sequence[Update], count: int) -> list[list[Update]]:
    """At most REPEATS disjoint groups of `count` updates."""
    starts = range(0, len(updates) - count + 1, count)
    return [list(updates[start : start + count]) for start in starts][:REPEATS]


def _sent(at: PriorKnowledge, group: Sequence[Update]) -> Sent:
    return at.summed(summed(group)) if len(group) > 1 else at.sent(group[0])


if __name__ == "__main__":
    from attacks.command import main

    raise SystemExit(main("sum_inversion"))
