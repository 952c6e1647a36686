"""A node's policy: the federations that its owner lets it take part in. [policy] of node.toml.

A node checks a charter against it before it reads its data. No server can change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from protocols.thresholds import surviving
from secure_fed.config import RunConfig
from secure_fed.config.setting import key
from secure_fed.deployment.charter import Charter, fingerprint
from secure_fed.errors import UsageError
from secure_fed.rounds.cohort import cohort_size, counts_on_secrecy


class PolicyError(UsageError):
    """The node's owner does not admit the charter."""


@dataclass(frozen=True)
class Policy:
    """The terms that a node's owner admits. An empty list admits everything, but for coordinators it admits nobody."""

    coordinators: tuple[str, ...] = key(
        (), "fingerprints of the coordinators' keys; with none here, no federation is admitted"
    )
    accept: str = key(
        "policy",
        "policy: these limits decide alone; ask: a person decides too, with `secure-fed node accept`, on every federation",
        choices=("policy", "ask"),
    )
    federations: tuple[str, ...] = key((), "names of federations; empty: any that such a coordinator founds")
    members: tuple[str, ...] = key(
        (), "fingerprints of the keys of all admitted members, this node's too; empty: whomever the coordinator names"
    )
    methods: tuple[str, ...] = key((), "methods, as `secure-fed methods` lists them; empty: any")
    models: tuple[str, ...] = key((), "base models; empty: any")
    privacy: bool = key(True, "every federation needs a differential privacy guarantee")
    units: tuple[str, ...] = key((), "units of a guarantee: client, example, person; empty: any")
    against_server: bool = key(
        False, "the guarantee has to hold against the server and the coordinator too, even if they lie"
    )
    most_epsilon: float = key(8.0, "the largest epsilon, of one federation and of all of them together", above=0.0)
    # Deltas add up like epsilons. The default admits ten federations at the default privacy.delta, 1e-5.
    most_delta: float = key(
        1e-4, "the largest delta, likewise; deltas add up, and 1e-5 is usual for one federation", above=0.0, below=1.0
    )
    most_rounds: int = key(1000, "the most rounds of a federation", at_least=1)
    least_cohort: int = key(
        3, "the fewest members in a round, and behind masks in a sum that is unmasked after dropouts", at_least=1
    )
    secure_aggregation: bool = key(
        True, "every federation has to mask contributions, so that the server sees sums alone"
    )
    active: bool = key(True, "and against a server that lies about keys and members, too")
    least_corrupt: float = key(
        0.1,
        "the least share of colluding members that masks have to withstand; among three or more it counts as at least one",
        at_least=0.0,
        below=0.5,
    )


def named(policy: Policy, charter: Charter) -> bool:
    """Whether the owner named the key that signed this charter."""
    return fingerprint(charter.coordinator) in policy.coordinators


def require(policy: Policy, charter: Charter) -> None:
    """PolicyError, in one sentence that names the limit, unless the policy admits the charter's terms."""
    for sentence in objections(policy, charter):
        raise PolicyError(f"the policy in node.toml does not admit the federation {charter.name!r:.80}: {sentence}")


def objections(policy: Policy, charter: Charter) -> Iterator[str]:
    """Each limit that the charter is beyond, in a sentence."""
    config = charter.config
    if not named(policy, charter):
        yield f"its coordinator {fingerprint(charter.coordinator)} is not among coordinators"
    for name, value, admitted in (
        ("federations", charter.name, policy.federations),
        ("methods", config.method.name, policy.methods),
        ("models", config.model.name, policy.models),
        ("units", config.privacy.unit, policy.units if config.privacy.unit != "none" else ()),
    ):
        if admitted and value not in admitted:
            yield f"{value!r:.80} is not among {name}"
    yield from _of_members(policy, charter)
    if config.federation.rounds > policy.most_rounds:
        yield f"it has {config.federation.rounds} rounds, more than most_rounds = {policy.most_rounds}"
    masks = config.secure_aggregation
    if policy.secure_aggregation and not masks.enabled:
        yield "it has no secure aggregation, and secure_aggregation = true asks for it"
    if masks.enabled and masks.corrupt < policy.least_corrupt:
        share = f"secure_aggregation.corrupt = {masks.corrupt:g}"
        yield f"its masks assume too few colluding members: {share}, below least_corrupt = {policy.least_corrupt:g}"
    if policy.active and not masks.active:
        yield "its secure aggregation is not active (secure_aggregation.active = false), and active = true asks for it"
    if counts_on_secrecy(config, len(charter.members)):
        sampling = config.federation.sampling
        yield f"its guarantee counts on nobody's seeing who takes part (federation.sampling = {sampling!r}), and others do"
    yield from _of_privacy(policy, charter)


def _of_members(policy: Policy, charter: Charter) -> Iterator[str]:
    strangers = [one.name for one in charter.members if fingerprint(one.identity) not in policy.members]
    if policy.members and strangers:
        yield f"{strangers[0]!r:.80} is not among members" + (
            f", nor are {len(strangers) - 1} others" if strangers[1:] else ""
        )
    masks, cohort = charter.config.secure_aggregation, cohort_size(charter.config, len(charter.members))
    if cohort < policy.least_cohort:
        yield f"a round has {cohort} members, fewer than least_cohort = {policy.least_cohort}"
    elif masks.enabled and (summed := surviving(cohort, masks.dropout)) < policy.least_cohort:
        yield (
            f"a sum may have {summed} of a round's {cohort} members (secure_aggregation.dropout = {masks.dropout:g}), fewer "
            f"than least_cohort = {policy.least_cohort}"
        )


def _of_privacy(policy: Policy, charter: Charter) -> Iterator[str]:
    privacy = charter.config.privacy
    if privacy.unit == "none":
        if policy.privacy:
            yield "it has no differential privacy, and privacy = true asks for it"
        return
    if privacy.epsilon is None:
        yield "it states no epsilon: its configuration has to set privacy.epsilon beside privacy.noise_multiplier"
    elif privacy.epsilon > policy.most_epsilon:
        yield f"its epsilon is {privacy.epsilon:g}, above most_epsilon = {policy.most_epsilon:g}"
    if privacy.delta > policy.most_delta:
        yield f"its delta is {privacy.delta:g}, above most_delta = {policy.most_delta:g}"
    by_clients = privacy.unit == "client"  # for other units a member adds the noise in its own training
    if policy.against_server and by_clients:
        yield from _of_a_lying_server(charter.config)


def _of_a_lying_server(config: RunConfig) -> Iterator[str]:
    if config.privacy.noise not in ("distributed", "local"):
        yield "its guarantee does not hold against the server, and against_server = true asks for it"
    elif config.privacy.noise == "distributed" and not config.secure_aggregation.active:
        yield (
            "with secure_aggregation.active = false a server that lies about keys can read a single member's contribution, and "
            "against_server = true asks for a guarantee against it"
        )
