"""Every attack of docs/deployment_threats.md within a round, in one run: each is reported and costs no more than it may."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from protocols.keys import Identity
from secure_fed import RunConfig
from secure_fed.deployment import charter as charters
from secure_fed.deployment import coordinator
from secure_fed.deployment.charter import Charter
from secure_fed.deployment.coordinator import agreed
from secure_fed.deployment.links import may_count
from secure_fed.rounds.transport import Reply
from secure_fed.tensors.tensors import Tensors
from tests.secure_fed.deployment.hostile import SCRIPTS, VICTIM, Lying, Member, OnTheWay, found
from tests.secure_fed.deployment.parties import founded
from tests.secure_fed.deployment.test_deployed_run import ACTIVE, PARTS, SKETCHED, config_of

SIGNED = {"secure_aggregation": ACTIVE["secure_aggregation"] | {"dropout": 0.25}}
METHODS: dict[str, Any] = {"one sum": {}, "two sums": SKETCHED}


def config(which: str) -> RunConfig:
    """The config of a run with as many rounds as the script has attacks."""
    return config_of(SIGNED, METHODS[which], {"federation": {"rounds": len(SCRIPTS[which])}})


@pytest.mark.nightly
@pytest.mark.parametrize("which", SCRIPTS)
def test_every_attack_of_a_run_is_noticed_and_costs_no_more_than_it_may(
    tmp_path: Path, which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SCRIPTS[which]
    party = founded(tmp_path, config(which), PARTS, lambda number: None)
    nodes: Any = party.carrier.nodes_
    nodes[100 + VICTIM] = Member(nodes[100 + VICTIM], script)
    party.carrier = OnTheWay(party.carrier, script)  # type: ignore[assignment]
    monkeypatch.setattr(coordinator, "Links", partial(Lying, script=script))
    result = party.conduct()
    assert [came for came in found(result.records, party.said, script) if came] == []


@pytest.mark.parametrize(
    ("weighting", "declared", "fitting", "others"),
    [
        ("uniform", 8, (0.0, 1.0), (0.5, 2.0, 8.0)),
        ("examples", 8, (0.0, 1.0, 8.0), (9.0, 1e36)),
        ("examples", None, (0.0, 8.0, 1e6), (1e36,)),
    ],
)
def test_a_weight_is_none_or_one_or_at_most_the_declared_examples(
    weighting: str, declared: int | None, fitting: tuple[float, ...], others: tuple[float, ...]
) -> None:
    config = agreed(config_of({"federation": {"weighting": weighting}, "data": {"test": "t"}}), [])
    key = Identity.new().public
    charter = Charter("c", "r", config, (0, 1), ("a", "b"), "0" * 64, (charters.Member("m", key, declared),), key)

    def counts(weight: float) -> bool:
        return may_count(charter, 0, Reply(0, Tensors(), weight, 0.0))

    assert all(map(counts, fitting))
    assert not any(map(counts, (*others, -1.0, math.inf, math.nan)))
