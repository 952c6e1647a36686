"""The guarantee's words on participation in a private run: coins, turns, and the neighbours that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from privacy.sampling import PublicOrder
from secure_fed.rounds.protection import Protection
from secure_fed.runs.assembly import Assembly

if TYPE_CHECKING:
    from privacy.plan import Plan


def neighbours(protection: Protection, plan: Plan) -> str:
    """The difference between neighbouring data sets, in words."""
    if protection.placement.share_noise or plan.exposures:
        sent = "zeros and its share of the noise" if protection.placement.share_noise else "zeros"
        public = "; everything else is public: the order, and who takes part" if plan.exposures else ""
        return f"one client's data present or absent; a client without data sends {sent}{public}"
    added = plan.release.adjacency == "add-remove"
    return f"{_NEIGHBOURS[protection.unit]} {'added or removed' if added else 'replaced by another'}"


def sampling(assembly: Assembly, plan: Plan) -> str:
    """How participants are chosen, and how the guarantee uses that."""
    protection, rate = assembly.protection, assembly.sampler.rate
    if protection.placement.step_noise:
        most = f"a client takes part in at most {plan.participations} rounds{_in_turn(assembly)}"
        return (
            "every client draws its batches by secret coins; the client with the weakest guarantee has rate "
            f"{plan.sampling_rate:.4g}; {most}"
        )
    if protection.placement.own_noise:
        return f"no amplification is counted; a client takes part in at most {plan.participations} rounds{_in_turn(assembly)}"
    if isinstance(assembly.sampler, PublicOrder):
        return _turns(assembly.sampler, assembly.config.federation.rounds)
    if protection.placement.share_noise and protection.hidden:
        return f"every client takes part in every round, and trains if its own secret coin says so, rate {rate:.4g}"
    if protection.placement.share_noise:
        return f"no amplification is counted: the participants of a round are visible, rate {rate:.4g}"
    if plan.release.adjacency == "add-remove":
        return f"a client takes part in a round if its own secret coin says so, rate {rate:.4g}"
    return f"a secret random cohort of fixed size in each round, rate {rate:.4g}, counted without replacement"


def _turns(order: PublicOrder, rounds: int) -> str:
    often = "in every round" if order.gap == 1 and order.size == order.places else _often(order, rounds)
    places = "1 place" if order.size == 1 else f"{order.size} places"
    return f"clients in turn, by a public order: each {often}; {places} in every round; an absent client's place stays empty"


def _often(order: PublicOrder, rounds: int) -> str:
    turns = order.turns(rounds)
    return f"at most once in {order.gap} rounds, and at most {'once' if turns == 1 else f'{turns} times'} in the run"


def _in_turn(assembly: Assembly) -> str:
    return ", in turn, by a public order" if isinstance(assembly.sampler, PublicOrder) else ""


PERSONS_AT_SEVERAL = ("a person with data at several clients, who is protected only as a group of that many clients",)
_NEIGHBOURS = {"client": "one client", "example": "one example", "group": "one person's examples"}
