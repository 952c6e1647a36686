"""Training clients in common passes gives the same state, to 1e-5, as training them one after the other, for every method."""

from __future__ import annotations

import pytest

from secure_fed.methods import METHODS
from secure_fed.methods.method import State
from secure_fed.rounds.transport import Together
from tests.cells import chosen
from tests.contracts import runs

CELLS = [
    (name, unit, how)
    for name in METHODS
    for unit in ("none", "client", "example")
    for how in ("plain", "masked")
    if runs.supported(name, unit) and ((unit, how) != ("example", "masked") or name == "ffa_lora")
]
QUICK = [
    *(("fedlora", "none", "plain"), ("fedtt", "none", "plain"), ("prefix_tuning", "none", "plain")),
]
# Methods that train one client after the other, with a part of the reason; fedft's embeddings have no rule for common passes.
IN_TURN = {"adamix": "draws random numbers beyond dropout", "fedft": "not each has its part"}


def after_a_round(name: str, unit: str, how: str, together: int) -> tuple[State, State, str]:
    """The states before and after, and the reason for training one client after the other; empty with common passes."""
    rounds = {"fra_then_ffa": 2, "fedara": 3}.get(name, 1)
    more = {"federation.rounds": rounds, "training.together": together, "training.batch_size": 3}
    built = runs.federation(runs.settings(name, unit, how, **more))
    training = getattr(built.assembly.transport, "prepare", None)
    result = built.run()
    return built.assembly.initial, result.state, training.ways.why_not if isinstance(training, Together) else "asked to"


@pytest.mark.parametrize(("name", "unit", "how"), chosen(CELLS, QUICK))
def test_common_passes_end_where_one_client_after_the_other_does(name: str, unit: str, how: str) -> None:
    initial, together, why_not = after_a_round(name, unit, how, 64)
    _, alone, _ = after_a_round(name, unit, how, 1)
    assert IN_TURN.get(name, "") in why_not
    assert bool(why_not) == (name in IN_TURN)
    start = initial.tensors.select(
        name for name in alone.tensors if alone.tensors[name].shape == initial.tensors[name].shape
    )
    moved = (alone.tensors.select(start) - start).norm()
    assert moved > 0
    assert (together.tensors - alone.tensors).norm() <= 1e-5 * max(moved, alone.tensors.norm())
