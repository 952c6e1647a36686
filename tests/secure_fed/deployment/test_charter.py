"""The charter: a signed text in which any change is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from protocols.keys import Identity
from secure_fed.config import RunConfig
from secure_fed.deployment.charter import Charter, CharterError, Member, fingerprint

COORDINATOR = Identity.new()
CONFIG = RunConfig().replace({("evaluation", "audit_fraction"): 0.0})
MEMBERS = tuple(Member(f"clinic {number}", Identity.new().public, 10 + number) for number in range(3))
CHARTER = Charter("hospitals", "run-1", CONFIG, ("a", 1), ("one", "two"), "model", MEMBERS, COORDINATOR.public)
SIGNED = CHARTER.signed(COORDINATOR)


def test_a_signed_charter_reads_back() -> None:
    assert Charter.verified(SIGNED) == CHARTER
    assert Charter.verified(SIGNED).digest == CHARTER.digest
    assert CHARTER.number(MEMBERS[1].identity) == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("evaluation.audit_fraction", 1.0),
        ("evaluation.audit_fraction", None),
        ("federation.vanishing", 0.1),
        ("federation.sampling", "poisson"),
        ("evaluation.per_client", True),
    ],
)
def test_a_charter_of_a_federation_that_nodes_cannot_run_is_refused(setting: str, value: Any) -> None:
    """A coordinator that lies may sign one: founding refuses these settings, too."""
    with pytest.raises(CharterError, match=f"cannot be used: {setting} = "):
        replace(CHARTER, config=CHARTER.config.replace({tuple(setting.split(".")): value}))


def test_a_charter_that_plans_fewer_rounds_than_it_states_is_refused() -> None:
    private = {("privacy", "unit"): "client", ("privacy", "epsilon"): 8.0, ("privacy", "noise_multiplier"): 1.0}
    config = CHARTER.config.replace(private)
    assert replace(CHARTER, config=config).config == config
    with pytest.raises(CharterError, match=r"cannot be used: privacy\.on_exhausted = "):
        replace(CHARTER, config=config.replace({("privacy", "on_exhausted"): "stop"}))


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


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_charter_is_refused(field: str) -> None:
    outer = json.loads(SIGNED)
    outer["charter"][field] = CHANGES[field]
    with pytest.raises(CharterError):
        Charter.verified(json.dumps(outer).encode())


@pytest.mark.parametrize(
    "change",
    [
        lambda charter: charter["members"][0].update(identity=Identity.new().public.hex()),
        lambda charter: charter["members"][0].update(examples=9),
        lambda charter: charter["members"].pop(),
        lambda charter: charter["config"]["privacy"].update(epsilon=100.0),
        lambda charter: charter["config"]["secure_aggregation"].update(corrupt=0.0),
    ],
)
def test_a_changed_member_or_setting_is_refused(change: Any) -> None:
    outer = json.loads(SIGNED)
    change(outer["charter"])
    with pytest.raises(CharterError, match=r"not signed|cannot be used"):
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
    with pytest.raises(CharterError, match="2 members of the federation are called 'clinic 0'"):
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
