"""The guarantee of a private run, from its plan and its actual charges, in numbers and in words.

    guarantee     the privacy part of `result.json`, of what the run has charged
    planned       the same before the first round, which a resumed run must compute again
    promised      sentences to read before the run reserves its budget
    unprotected   the one sentence on a run without privacy

All of them take their words from `statement_of`, which puts together a `privacy.statement.Statement`: what is protected, how
participants are chosen, who adds the noise, who is trusted, and what is not covered. The protection by masks depends on two
assumptions, which every sentence on trust names: whether the server follows the protocol, and how many clients collude with it.
The functions `noise_...` put the figures of a run's probe (`runs/hopeless.py`) into words, for refusals, progress, reports and
model cards.

Needs no torch, so that a report starts at once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from privacy.participation import PublicOrder
from privacy.statement import NOT_COVERED, Statement
from secure_fed.config import RunConfig, SecureAggregationConfig
from secure_fed.learning.data.holdout import HELD_OUT

if TYPE_CHECKING:
    from privacy.plan import Plan
    from secure_fed.rounds.masked.wiring import Masks
    from secure_fed.rounds.protection import Protection
    from secure_fed.rounds.sums import Record
    from secure_fed.runs.assembly import Assembly
    from secure_fed.runs.budget import RunBudget

DELTAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
GROUPS = (2, 5)
GROUP_DELTAS = (1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2)
NO_PRIVACY = (
    "No differential privacy and no secure aggregation: the server sees every client's contribution, "
    "and nothing bounds what the model reveals of its training data."
)


def guarantee(assembly: Assembly, budget: RunBudget, run_dir: Path | None, records: Sequence[Record]) -> dict[str, Any]:
    """The privacy part of `result.json`.

    releases: the number charged, or where clients are charged, the most charged to one client. epsilon covers the whole plan
    and the repetitions of interrupted rounds: nothing is refunded for planned releases that were not made.
    """
    from privacy import composition

    protection, plan = assembly.protection, budget.plan
    spent = budget.ledger.spent()
    charged = max(budget.charged.values(), default=0)
    covered = plan.releases if plan.limits else max(charged, plan.releases)  # a client never exceeds its limit
    statement = statement_of(assembly, covered)
    return {
        "unit": protection.unit,
        "epsilon": statement.epsilon,
        "epsilon_participants": statement.epsilon_participants,
        "holds_against": list(statement.holds_against),
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "sampling_rate": plan.sampling_rate,
        "releases": charged,
        "epsilon_cumulative": spent.epsilon,
        "delta_cumulative": spent.delta,
        "privacy": {
            **statement.to_dict(),
            **_meaning(plan, covered),
            "place": protection.placement.name,
            "hidden_cohort": protection.hidden,
            "clip_norm": protection.clip_norm,
            "planned_releases": _most(protection, plan.releases),
            "participations": plan.participations,
            "realised": _realised(assembly, plan, covered, records),
            "renyi": {f"{order:g}": found for order, found in composition.of_plan(plan, covered).items()},
            "ledger": str(budget.ledger.path) if run_dir else None,  # without a run directory it ends with the run
            "data_set": budget.ledger.data_set,
            "budget_epsilon": budget.ledger.epsilon,
            "budget_delta": budget.ledger.delta,
        },
        "privacy_statement": statement.text,
    }


def _realised(assembly: Assembly, plan: Plan, releases: int, records: Sequence[Record]) -> dict[str, Any] | None:
    """The epsilon of the releases under the survivors' noise, with the fewest survivors of any round. It refunds nothing."""
    shares, masks = assembly.protection.shares, assembly.masks
    if shares is None or masks is None or not records:
        return None
    from privacy.plan import realised

    counted = [record["masked"]["survivors"] for record in records if "masked" in record]
    survivors = min((count for count in counted if count is not None), default=None)
    if survivors is None:  # every round was lost
        return None
    honest = survivors - (masks.sums.terms.least(masks.invited) - shares.shares)
    multiplier = plan.noise_multiplier * math.sqrt(honest / shares.shares)
    epsilon = realised(plan, multiplier, releases, hidden=assembly.protection.hidden)
    return {"survivors": survivors, "noise_multiplier": multiplier, "epsilon": epsilon}


def _meaning(plan: Plan, releases: int) -> dict[str, Any]:
    """What the guarantee means beyond one epsilon: at other deltas, as a test between two laws, and for several units together.

    curve: epsilon at deltas around the run's, as far as the accountant resolves them. gaussian_mu: as `Plan.gaussian`. groups:
    for groups of two and five units, epsilon at the run's delta, or at the smallest larger power of ten at which one follows;
    left out where none does. exact: whether it is computed from mu.
    """
    from privacy.composition import group_epsilon, group_epsilon_by_curve

    curve = plan.curve(sorted({*DELTAS, plan.delta}, reverse=True), releases)
    mu, groups = plan.gaussian(releases), []
    for units in GROUPS:
        for delta in (plan.delta, *(delta for delta in GROUP_DELTAS if delta > plan.delta)):
            epsilon = group_epsilon_by_curve(curve, units, delta) if mu is None else group_epsilon(mu, units, delta)
            if epsilon is not None:
                groups.append({"units": units, "delta": delta, "epsilon": epsilon, "exact": mu is not None})
                break
    points = [{"delta": delta, "epsilon": epsilon} for delta, epsilon in curve]
    return {"curve": points, "gaussian_mu": mu, "groups": groups}


def planned(assembly: Assembly) -> dict[str, Any]:
    """The guarantee of the whole plan, as a run notes it at its start; a resumed run must compute the same."""
    protection, plan = assembly.protection, assembly.protection.plan
    if plan is None:
        return {}
    statement = statement_of(assembly, plan.releases)
    noise = {"noise_multiplier": plan.noise_multiplier, "clip_norm": protection.clip_norm}
    only_there = protection.given and not assembly.config.privacy.mechanism  # only that program can make it again
    given = {"given": repr(plan.mechanism)} if only_there else {}
    return {"privacy": {**statement.to_dict(), **noise, **given, "text": statement.text}}


def promised(assembly: Assembly, plan: Plan, cost: str) -> list[str]:
    """The guarantee of a private run, its noise and its cost, in sentences to read before the run reserves its budget."""
    statement = statement_of(assembly, plan.releases)
    return [
        f"guarantee: {statement.headline}",
        f"noise: {statement.mechanism}; it is added {statement.noise}.",
        f"cost: {cost}.",
    ]


def dummy_units(unit: str) -> str:
    """The noun behind "dummy", by the unit that privacy protects: dummy clients, or dummy examples."""
    return "clients" if unit in ("client", "none") else "examples"


def dummies_enter(unit: str) -> str:
    """How the contributions of dummy units reach the releases, so that noise and guarantee are as without them."""
    if dummy_units(unit) == "clients":
        return "the server adds their contributions to the clients' sum, after masks and noise, in no client's place"
    return "they are in the clients' steps, before any noise, in no example's place"


def unprotected(config: RunConfig) -> str:
    """The protection of clients in a run without privacy, in words."""
    masks, coins = config.secure_aggregation, config.federation.sampling == "poisson"
    return only_masks(masks, coins=coins) if masks.enabled else NO_PRIVACY


def only_masks(settings: SecureAggregationConfig, *, coins: bool) -> str:
    """The protection of clients in a run with masks and without privacy. coins: whether coins draw its cohorts."""
    server = _KEEPS if not settings.active else "the server, even one that lies about keys or about who takes part,"
    lies = "" if settings.active else " A server that lies may read single clients."
    whose = _drawn(settings) if coins else "a round's clients"
    return (
        f"No differential privacy: secure aggregation keeps every client's contribution from {server} {_colluding(settings)}. "
        f"It learns sums over {whose}.{lies} Nothing bounds what these sums and the model reveal of the "
        "training data."
    )


def statement_of(assembly: Assembly, releases: int) -> Statement:
    """The statement of a run that makes `releases` releases."""
    protection, plan, tested = assembly.protection, assembly.protection.plan, assembly.problem.facts["test"]["from"]
    if plan is None:
        raise ValueError("a run without privacy has no guarantee to state")
    words = protection.placement.words
    over_rounds = dummies = ""
    if plan.exposures:
        over_rounds = ", independent in every round"
    if (band := plan.correlation.band) > 1:
        over_rounds = f", correlated over {band} rounds: each round's noise cancels part of the noise of earlier rounds"
    if count := protection.dummies.dummies:
        dummies = (
            f". There are also {count} dummy {dummy_units(protection.unit)}, which hold nobody's data and exist for the audit "
            f"alone; about half of them, chosen at random, contribute: {dummies_enter(protection.unit)}. Their membership "
            "figures are computed from the releases alone"
        )
    uncovered = words.not_covered
    if protection.hidden:
        uncovered = ("when a client drops out and how long it takes to answer, which may reveal whether it trained",)
    return Statement(
        unit=_UNITS[protection.unit],
        adjacency=_neighbours(protection, plan),
        epsilon=plan.epsilon(releases),
        epsilon_participants=plan.epsilon_participants(releases),
        delta=plan.delta,
        mechanism=_mechanism(protection, plan, releases),
        sampling=_sampling(assembly, plan),
        accountant=_accountant(protection, plan),
        noise=f"{words.noise}{over_rounds}",
        trust=_trusted(protection, assembly.masks),
        holds_against=protection.placement.holds_against,
        released=f"{words.released.format(_most(protection, releases))}, and every model made of them{dummies}",
        not_covered=(
            *NOT_COVERED,
            *_MEMBERSHIP,
            *(_SHARE_HELD_OUT if protection.audited else ()),
            *uncovered,
            *(_GIVEN if protection.given else ()),
            *(_LOCAL if assembly.local is not None and assembly.everybody_here else ()),
            *(_PERSONAL if assembly.server.personal and not protection.placement.step_noise else ()),
            *_TESTED.get(tested, ()),
        ),
        private=protection.entropy.private,
    )


def _neighbours(protection: Protection, plan: Plan) -> str:
    """The difference between neighbouring data sets, in words."""
    if protection.placement.share_noise or plan.exposures:
        sent = "zeros and its share of the noise" if protection.placement.share_noise else "zeros"
        public = "; everything else is public: the order, and who takes part" if plan.exposures else ""
        return f"one client's data present or absent; a client without data sends {sent}{public}"
    added = plan.release.adjacency == "add-remove"
    return f"{_NEIGHBOURS[protection.unit]} {'added or removed' if added else 'replaced by another'}"


def _sampling(assembly: Assembly, plan: Plan) -> str:
    """How participants are chosen, and how the guarantee uses that."""
    protection, rate = assembly.protection, assembly.sampler.rate
    in_turn = ", in turn, by a public order" if isinstance(assembly.sampler, PublicOrder) else ""
    if protection.placement.step_noise:
        return (
            "every client draws its batches by secret coins; the client with the weakest guarantee has rate "
            f"{plan.sampling_rate:.4g}; a client takes part in at most {plan.participations} rounds{in_turn}"
        )
    if protection.placement.own_noise:
        return f"no amplification is counted; a client takes part in at most {plan.participations} rounds{in_turn}"
    if isinstance(assembly.sampler, PublicOrder):
        order, turns = assembly.sampler, assembly.sampler.turns(assembly.config.federation.rounds)
        often = (
            f"at most once in {order.gap} rounds, and at most {'once' if turns == 1 else f'{turns} times'} in the run"
        )
        if order.gap == 1 and order.size == order.places:
            often = "in every round"
        places = f"{'1 place' if order.size == 1 else f'{order.size} places'} in every round"
        return f"clients in turn, by a public order: each {often}; {places}; an absent client's place stays empty"
    if protection.placement.share_noise and protection.hidden:
        return f"every client takes part in every round, and trains if its own secret coin says so, rate {rate:.4g}"
    if protection.placement.share_noise:
        return f"no amplification is counted: who takes part in a round is visible, rate {rate:.4g}"
    if plan.release.adjacency == "add-remove":
        return f"a client takes part in a round if its own secret coin says so, rate {rate:.4g}"
    return f"a secret random cohort of fixed size in each round, rate {rate:.4g}, counted without replacement"


def _mechanism(protection: Protection, plan: Plan, releases: int) -> str:
    from privacy.mechanisms import AdaptiveGaussian

    mechanism, norm = plan.mechanism, "norm"
    law = "distributed discrete Gaussian" if protection.placement.share_noise else "Gaussian"
    if protection.given:
        law, norm = f"{type(mechanism).__name__}, given in Python,", f"L{mechanism.order:g} norm"
    clipped = f"every {protection.placement.words.clipped} clipped to {norm} {protection.clip_norm:g} over all tensors together"
    if isinstance(mechanism, AdaptiveGaussian):
        clipped += f" at first, later to quantile {mechanism.quantile:g}; every charge includes the noised count"
    if plan.exposures:
        moved = f"{plan.sensitivity(releases):.6g} times the clip norm"
        clipped += f"; all rounds together are one such mechanism, whose output one client changes by at most {moved}"
    return f"{law} with noise multiplier {plan.noise_multiplier:g}, {clipped}"


def _most(protection: Protection, releases: int) -> int:
    """The most releases: of the federation, or of one client, which need not be the client with the largest epsilon."""
    return max(protection.plan.limits.values(), default=releases) if protection.plan else releases


def _accountant(protection: Protection, plan: Plan) -> str:
    if protection.given:
        return (
            f"privacy loss distributions (dp_accounting) of the event that the mechanism states, {plan.mechanism.event}"
        )
    if plan.release.plain:
        return _OF_SHARES if protection.placement.share_noise else _EXACT
    return _ACCOUNTANTS[plan.release.accountant]


def _trusted(protection: Protection, masks: Masks | None) -> str:
    """The parties that could break the guarantee of a private run."""
    if protection.placement.local:
        return _OWN_MACHINE if masks is None else f"{_OWN_MACHINE}, with masks or without"
    if masks is None:
        return f"{_PLAIN}, and keeps the noise{_coins(protection)} secret"
    return _of_sums(protection, masks) if protection.placement.server_noise else _of_shares(protection, masks)


def _of_sums(protection: Protection, masks: Masks) -> str:
    """With noise that the server adds to sums."""
    terms = masks.sums.terms
    whose = _drawn(terms.settings) if terms.varies else "a round's clients"
    active = terms.settings.active
    how = "even if it lies about keys or about who takes part" if active else "as long as it keeps to the protocol"
    return (
        f"the server is trusted: before it adds the noise it sees sums over {whose}; it keeps the noise{_coins(protection)} "
        f"secret; of the contributions it sees only these sums, {how}, {_colluding(terms.settings)}"
    )


def _of_shares(protection: Protection, masks: Masks) -> str:
    """With noise that the clients add inside sums."""
    terms, counted = masks.sums.terms, protection.shares.shares if protection.shares else 0
    least, chance = terms.least(masks.invited), terms.choice(masks.invited).failure
    colluding = f"colluding with at most {least - counted} of" if least > counted else "colluding with none of"
    server, trust = _ACTIVE if terms.settings.active else _PASSIVE
    unless = ""
    if chance:  # rounded up to a power of two
        unless = f", except with a probability of at most 2^{-math.floor(-10 * math.log2(chance)) / 10:g} for each sum"
    return (
        f"{trust}; {server}, {colluding} the {masks.invited} clients invited to a sum, learns only noised sums, in each of "
        f"which the guarantee counts on {counted} shares of noise; no sum of fewer than {least} clients is unmasked{unless}"
    )


def _coins(protection: Protection) -> str:
    return " and its draws of cohorts" if protection.hides_cohort else ""


def _drawn(settings: SecureAggregationConfig) -> str:
    """The clients of a sum, where the server draws the cohort by secret coins."""
    drawn = "the clients that it draws"
    return f"{drawn}, of whom at least two are honest" if settings.active else f"{drawn}, possibly a single one"


def _colluding(settings: SecureAggregationConfig) -> str:
    """The number of clients that may collude with the server: a share, because rounds differ in size."""
    if not settings.corrupt:
        return "while no client colludes with it"
    return f"while at most {100 * settings.corrupt:g} % of a round's clients (rounded up) collude with it"


def noise_in_words(found: Mapping[str, Any], loss: float | None = None) -> str:
    """The loss before and after the noise alone, with chance beside it, and the loss that the run reached."""
    chance = "" if found["chance"] is None else f"; {_loss(found['chance'])} is chance, equal scores for all answers"
    return (
        f"this noise alone takes the loss from {_loss(found['start'])} before training to {_loss(found['noised'])} "
        f"({found['rows']} {found['texts']}{chance}){_reached(found, loss)}"
    )


def noise_in_short(found: Mapping[str, Any], loss: float | None = None) -> str:
    """The same, short, for a table that has the accuracy."""
    chance = "" if found["chance"] is None else f", {_loss(found['chance'])} is chance"
    full = f", at steps that are not shortened {_loss(found['full'])}" if found["shortened"] else ""
    alone = f"{_loss(found['start'])} before training to {_loss(found['noised'])}"
    return f"takes the loss from {alone}{full}{chance} ({found['texts']}){_reached(found, loss)}"


def _reached(found: Mapping[str, Any], loss: float | None) -> str:
    """The run's own loss, if both are of test rows."""
    return "" if loss is None or found["texts"] != "test rows" else f"; with its data this run ended at {_loss(loss)}"


def shortened_steps(found: Mapping[str, Any]) -> str:
    """The sentence on steps that the server shortens; empty where it does not."""
    if not found["shortened"]:
        return ""
    return (
        "the server shortens its steps under this noise, and the model learns as much less: at full steps the noise would take "
        f"the loss to {_loss(found['full'])}"
    )


def hopeless_noise(found: Mapping[str, Any]) -> str:
    """The sentence on a hopeless run, with what would do; empty for any other."""
    if not found["hopeless"]:
        return ""
    other = "privacy.unit = 'example'" if found["unit"] == "client" else "a larger epsilon"
    enough = found["enough"]
    cohort = "" if enough is None else f"cohorts of about {enough:,}, among as many times more clients, would do, and "
    return f"the noise alone takes the model to chance, and hardly anything can be learned; {cohort}{other} needs less noise"


def _loss(loss: float | None) -> str:
    return "no finite number" if loss is None else f"{loss:.4g}"


_OWN_MACHINE = "nobody but the client's own machine"
_PLAIN = "the server is trusted: it sees every contribution before it adds the noise"
_KEEPS = "a server that keeps to the protocol,"
_PASSIVE = (
    "a server that follows it",
    "the server must follow the protocol, and nothing stops one that lies: it could read a single client's contribution, "
    "protected only by that client's share of the noise",
)
_ACTIVE = (
    "any server, even one that lies",
    "whoever distributes the clients' signing keys must distribute the right ones, and no other single party is trusted",
)
_TESTED = {
    HELD_OUT[unit]: (f"{whose} held out for testing: they never train, and measurements on them have no noise",)
    for unit, whose in (("client", "the clients"), ("person", "the persons"), ("example", "the rows"))
}
_GIVEN = ("a mechanism that adds less noise than it states, or noise of another law: secure-fed does not check this",)
_LOCAL = (
    "what the function that trains (local) keeps outside its model for another client's call, as in a global variable or a "
    "file: secure-fed does not see it",
)
_PERSONAL = ("a client's personal tensors, which have no noise: nothing protects the client's data once they leave it",)
_UNITS = {
    "client": "a client with everything it has",
    "example": "one example of one client",
    "person": "all examples of one person at one client",
}
_EXACT = "exact: one Gaussian mechanism for the whole run (dp_accounting)"
_OF_SHARES = "one Gaussian mechanism for the whole run (dp_accounting), which hides no more than the shares do"
_ACCOUNTANTS = {
    "pld": "privacy loss distributions (dp_accounting), exact for plain Gaussians",
    "rdp": "Renyi privacy of sampling without replacement (dp_accounting), or no amplification where that is less",
}
_MEMBERSHIP = (
    "membership figures of units of the data (those of dummy units are covered), and audits and recordings of the data: they "
    "are computed without noise, for the owners of the data",
    "where canaries are planted for an audit (evaluation.canaries), the data before planting",
)
_SHARE_HELD_OUT = (
    "the number of all units, which is taken as public: it decides which share of them is held out for an audit "
    "(evaluation.audit_fraction)",
)
_NEIGHBOURS = {"client": "one client", "example": "one example", "person": "one person's examples"}
