"""Personal tensors stay on their client in every round, also where each round trains other tensors."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from secure_fed.errors import MethodError
from tests.cells import chosen
from tests.contracts import runs

TURNS = [("rolora", "*.lora_*"), ("rolora", "*.lora_A.*"), ("fedtt_plus", "*.core_*"), ("fedlora", "*.lora_B.*")]


@pytest.mark.parametrize("how", runs.SUMS)
@pytest.mark.parametrize(("name", "pattern"), chosen(TURNS, [TURNS[0], TURNS[2]]))
def test_it_never_travels(name: str, pattern: str, how: str, tmp_path: Path) -> None:
    """Also after the first round, in which some of the tensors do not train, a run directory has each client's own."""
    built = runs.federation(runs.settings(name, "none", how, **{"method.personal": [pattern], "federation.rounds": 3}))
    events = runs.watch(built)
    built.run(tmp_path / "run")
    sent = {
        tensor
        for replies in (events.replies, events.requests)
        for at in replies.values()
        for one in at.values()
        for tensor in (one.contribution if hasattr(one, "contribution") else one.tensors)
    }
    assert sent
    assert not [tensor for tensor in sent if fnmatchcase(tensor, pattern)]
    kept = {name for client in built.assembly.clients for name in client.kept or ()}
    assert kept
    assert all(fnmatchcase(name, pattern) for name in kept)


def test_what_leaves_in_a_product_in_some_round_is_refused() -> None:
    config = runs.settings("fra_then_ffa", **{"method.personal": ["*.lora_B.*"], "federation.rounds": 3})
    with pytest.raises(MethodError, match="only inside a product"):
        runs.federation(config)
