"""A node's policy: a charter can break each of its limits, and the refusal names the limit."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from protocols.keys import Identity
from secure_fed.config import RunConfig
from secure_fed.deployment.charter import Charter, CharterError, Member, fingerprint
from secure_fed.deployment.policy import Policy, PolicyError, objections, require

COORDINATOR = Identity.new()
MEMBERS = tuple(Member(f"clinic {number}", Identity.new().public) for number in range(10))
TERMS: dict[str, dict[str, Any]] = {
    "federation": {"rounds": 10, "cohort": 5, "sampling": "schedule"},
    "method": {"name": "ffa_lora"},
    "privacy": {"unit": "client", "epsilon": 8.0, "delta": 1e-5, "noise": "central"},
    "secure_aggregation": {"enabled": True},
    "evaluation": {"audit_fraction": 0.0},
}
ACTIVE = {"secure_aggregation": {"active": True}}
POLICY = Policy(coordinators=(fingerprint(COORDINATOR.public),), active=False)


def charter(**changes: dict[str, Any]) -> Charter:
    tables = {section: TERMS.get(section, {}) | changes.get(section, {}) for section in {*TERMS, *changes}}
    config = RunConfig.from_dict({section: table for section, table in tables.items() if table})
    return Charter("hospitals", "run", config, ("a", "b"), ("a", "b"), "m", MEMBERS, COORDINATOR.public)


def test_the_usual_policy_admits_what_it_should() -> None:
    usual = Policy(coordinators=POLICY.coordinators)
    require(usual, charter(**ACTIVE))
    assert len([*objections(usual, charter())]) == 1, "active"
    require(POLICY, charter())
    named = replace(
        POLICY,
        federations=("hospitals",),
        methods=("ffa_lora",),
        models=("builtin/tiny",),
        least_cohort=5,
        most_rounds=10,
    )
    require(named, charter())
    require(replace(POLICY, units=("client",), members=tuple(fingerprint(one.identity) for one in MEMBERS)), charter())
    require(replace(POLICY, against_server=True), charter(privacy={"noise": "distributed"}, **ACTIVE))


BROKEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("coordinators", {"coordinators": ()}, {}),
    ("coordinators", {"coordinators": (fingerprint(Identity.new().public),)}, {}),
    ("federations", {"federations": ("banks",)}, {}),
    ("methods", {"methods": ("fedlora",)}, {}),
    ("models", {"models": ("bert",)}, {}),
    ("'clinic 0' is not among members, nor are 8 others", {"members": (fingerprint(MEMBERS[3].identity),)}, {}),
    ("units", {"units": ("client",)}, {"privacy": {"unit": "example", "noise": "auto"}}),
    ("least_cohort", {"least_cohort": 6}, {}),
    (
        "a sum may have 3 of a round's 5 members .* least_cohort",
        {"least_cohort": 5},
        {"secure_aggregation": {"dropout": 0.4}},
    ),
    ("most_rounds", {"most_rounds": 9}, {}),
    ("most_epsilon", {}, {"privacy": {"epsilon": 8.1}}),
    ("most_delta", {}, {"privacy": {"delta": 2e-4}}),
    ("against_server", {"against_server": True}, {}),
    ("active = false .* against_server", {"against_server": True}, {"privacy": {"noise": "distributed"}}),
    ("active", {"active": True}, {}),
    ("least_corrupt", {}, {"secure_aggregation": {"corrupt": 0.09}}),
    ("secure_aggregation", {}, {"secure_aggregation": {"enabled": False}}),
    ("privacy", {}, {"privacy": {"unit": "none"}}),
]


@pytest.mark.parametrize(("name", "policy", "terms"), BROKEN)
def test_each_limit_is_kept_and_named(name: str, policy: dict[str, Any], terms: dict[str, Any]) -> None:
    if terms == {"privacy": {"unit": "none"}}:
        config = RunConfig.from_dict(
            {section: TERMS[section] for section in ("secure_aggregation", "federation", "evaluation")}
        )
        offered = replace(charter(), config=config)
    else:
        offered = charter(**terms)
    with pytest.raises(PolicyError, match=name):
        require(replace(POLICY, **policy), offered)


def test_what_a_charter_leaves_open_is_judged_by_what_is_run() -> None:
    """A round has ten members if federation.cohort is not set, and the server may add the noise if privacy.noise is "auto"."""
    many = tuple(Member(f"clinic {number}", Identity.new().public) for number in range(40))
    offered = replace(charter(federation={"cohort": None}), members=many)
    require(replace(POLICY, least_cohort=9), offered)
    with pytest.raises(PolicyError, match="a round has 10 members, fewer than least_cohort = 11"):
        require(replace(POLICY, least_cohort=11), offered)
    with pytest.raises(PolicyError, match="against_server"):
        require(
            replace(POLICY, against_server=True), charter(privacy={"noise": "auto"}, federation={"sampling": "auto"})
        )


@pytest.mark.parametrize("sampling", ["fixed", "poisson"])
def test_a_guarantee_that_counts_on_secret_cohorts_is_not_admitted(sampling: str) -> None:
    """A coordinator refuses such settings too, but a node does not rely on the coordinator's check."""
    many = tuple(Member(f"clinic {number}", Identity.new().public) for number in range(6))
    terms = {"federation": {"sampling": sampling}, "secure_aggregation": {"enabled": sampling == "fixed"}}
    said = "counts on nobody's seeing who takes part .*'fixed'" if sampling == "fixed" else "draws clients in secret"
    with pytest.raises(PolicyError if sampling == "fixed" else CharterError, match=said):
        require(replace(POLICY, secure_aggregation=False), replace(charter(**terms), members=many))


@pytest.mark.parametrize(
    "terms",
    [
        {"privacy": {"noise": "distributed"}},
        {"privacy": {"noise": "local"}},
        {"privacy": {"unit": "example", "noise": "auto"}},
        {"federation": {"cohort": len(MEMBERS)}},
    ],
    ids=str,
)
def test_a_fixed_cohort_that_anybody_may_see_is_admitted(terms: dict[str, dict[str, Any]]) -> None:
    federation = terms.get("federation", {}) | {"sampling": "fixed"}
    require(POLICY, charter(**terms | {"federation": federation}))


def test_a_noise_multiplier_alone_states_no_epsilon() -> None:
    offered = charter(privacy={"epsilon": None, "noise_multiplier": 1.0})
    with pytest.raises(PolicyError, match="states no epsilon"):
        require(POLICY, offered)


def test_every_limit_has_a_charter_that_breaks_it() -> None:
    words = {word.strip(",") for name, _, _ in BROKEN for word in name.split()}
    assert [one.name for one in fields(Policy) if one.name not in words] == ["accept"], "a person's limit"
