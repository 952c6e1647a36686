"""The charter, a signed text in which any change is refused, and a node's policy, whose broken limit is named."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from protocols.keys import Identity
from secure_fed.config import RunConfig
from secure_fed.deployment.charter import Charter, CharterError, Member, fingerprint
from secure_fed.deployment.policy import Policy, PolicyError, objections, require
from secure_fed.errors import ConfigError
from tests.cells import every

COORDINATOR = Identity.new()
CONFIG = RunConfig().replace({("evaluation", "audit_fraction"): 0.0})
MEMBERS = tuple(Member(f"clinic {number}", Identity.new().public, 10 + number) for number in range(3))
CHARTER = Charter("hospitals", "run-1", CONFIG, ("a", 1), ("one", "two"), "model", MEMBERS, COORDINATOR.public)
SIGNED = CHARTER.signed(COORDINATOR)


def test_a_signed_charter_reads_back() -> None:
    assert Charter.verified(SIGNED) == CHARTER
    assert Charter.verified(SIGNED).digest == CHARTER.digest
    assert CHARTER.number(MEMBERS[1].identity) == 1


def test_a_charter_of_a_federation_that_nodes_cannot_run_is_refused() -> None:
    """A coordinator that lies may sign one. Founding refuses the same settings: `test_home.py` has all of them."""
    private = {("privacy", "unit"): "client", ("privacy", "epsilon"): 8.0, ("privacy", "noise_multiplier"): 1.0}
    config = CHARTER.config.replace(private)
    assert replace(CHARTER, config=config).config == config
    wrong = {"evaluation.audit_fraction": None, "federation.sampling": "poisson", "privacy.on_exhausted": "stop"}
    for setting, value in wrong.items():
        with pytest.raises(CharterError, match=f"cannot be used: {setting} = "):
            replace(CHARTER, config=config.replace({tuple(setting.split(".")): value}))


def test_no_setting_of_a_charter_names_a_nodes_function() -> None:
    for section in json.loads(CHARTER.text)["config"]:
        with pytest.raises(ConfigError):
            RunConfig.from_dict({section: {"local": "mine.py:train"}})
        named = json.loads(CHARTER.text)
        named["config"][section]["local"] = "mine.py:train"
        with pytest.raises(CharterError, match="local"):
            Charter.verified(json.dumps({"charter": named, "signature": ""}).encode())


CHANGES: dict[str, Any] = {
    "name": "others",
    "run": "run-2",
    "labels": ["b", 1],
    "label_names": ["one", "three"],
    "model_digest": "another",
    "coordinator": Identity.new().public.hex(),
    "version": "0.0.1",
    "schema": 2,
    "more": 1,
}


@every(
    "change",
    [
        *(lambda charter, field=field: charter.update({field: CHANGES[field]}) for field in CHANGES),
        lambda charter: charter["members"][0].update(identity=Identity.new().public.hex()),
        lambda charter: charter["members"][0].update(examples=9),
        lambda charter: charter["members"].pop(),
        lambda charter: charter["config"]["privacy"].update(epsilon=100.0),
        lambda charter: charter["config"]["secure_aggregation"].update(corrupt=0.0),
    ],
)
def test_a_changed_charter_is_refused(change: Any) -> None:
    outer = json.loads(SIGNED)
    change(outer["charter"])
    with pytest.raises(CharterError):
        Charter.verified(json.dumps(outer).encode())


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b"[" * 10**5, b'{"charter": 1, "signature": ""}', bytes(17 * 10**6)]
)
def test_anything_else_is_the_typed_error(content: bytes) -> None:
    with pytest.raises(CharterError):
        Charter.verified(content)


def test_nobody_else_can_sign() -> None:
    other = Identity.new()
    with pytest.raises(CharterError, match="another coordinator"):
        CHARTER.signed(other)
    forged = json.loads(replace(CHARTER, coordinator=other.public).signed(other))
    forged["charter"]["coordinator"] = COORDINATOR.public.hex()
    with pytest.raises(CharterError, match="not signed"):
        Charter.verified(json.dumps(forged).encode())


def test_members_have_names_and_keys_of_their_own() -> None:
    with pytest.raises(CharterError, match="2 members of the federation are called 'clinic 0': their owners"):
        replace(CHARTER, members=(*MEMBERS, MEMBERS[0]))
    with pytest.raises(CharterError, match="one identity"):
        replace(CHARTER, members=(*MEMBERS, replace(MEMBERS[0], name="clinic 9")))
    with pytest.raises(CharterError, match="not among the 3 members"):
        CHARTER.number(Identity.new().public)


@pytest.mark.parametrize("name", ["", " a", "a  b", "a\nb", "a\u202eb", "a" * 49])
def test_a_charter_that_nobody_could_read_is_not_made(name: str) -> None:
    with pytest.raises(CharterError, match="is no name of one printable line"):
        replace(CHARTER, name=name)
    with pytest.raises(CharterError, match="is no name of one printable line"):
        replace(CHARTER, members=(replace(MEMBERS[0], name=name), *MEMBERS[1:]))


@pytest.mark.parametrize("name", [" ", "a" * 1001])
def test_a_class_that_no_member_could_read_the_name_of_is_refused(name: str) -> None:
    with pytest.raises(CharterError, match="the name of a class has 1 to 1,000"):
        replace(CHARTER, label_names=(name, *CHARTER.label_names[1:]))
    longest = replace(CHARTER, label_names=("a" * 1000, *CHARTER.label_names[1:]))
    assert Charter.verified(longest.signed(COORDINATOR)) == longest


def test_a_fingerprint_is_short_enough_to_read_aloud() -> None:
    assert len(fingerprint(COORDINATOR.public)) == 49
    assert fingerprint(COORDINATOR.public) != fingerprint(MEMBERS[0].identity)


# What a node's policy admits.

TEN = tuple(Member(f"clinic {number}", Identity.new().public) for number in range(10))
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
    return Charter("hospitals", "run", config, ("a", "b"), ("a", "b"), "m", TEN, COORDINATOR.public)


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
    require(replace(POLICY, units=("client",), members=tuple(fingerprint(one.identity) for one in TEN)), charter())
    require(replace(POLICY, against_server=True), charter(privacy={"noise": "distributed"}, **ACTIVE))


BROKEN: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("coordinators", {"coordinators": ()}, {}),
    ("coordinators", {"coordinators": (fingerprint(Identity.new().public),)}, {}),
    ("federations", {"federations": ("banks",)}, {}),
    ("methods", {"methods": ("fedlora",)}, {}),
    ("models", {"models": ("bert",)}, {}),
    ("'clinic 0' is not among members, nor are 8 others", {"members": (fingerprint(TEN[3].identity),)}, {}),
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
        {"federation": {"cohort": len(TEN)}},
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
