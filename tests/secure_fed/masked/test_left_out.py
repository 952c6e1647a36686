"""A contribution that cannot be encoded is left out without a name, or fails the run, according to federation.nonfinite."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from secure_fed.errors import TrainingError
from secure_fed.federation import Federation
from secure_fed.rounds.transport import Reply
from tests.secure_fed.masked.wide_toys import MASKED, federation, flat, listen, one_round

ACTIVE = {"secure_aggregation.active": True}


def outgrown(built: Federation, clients: set[int], factor: float) -> None:
    """Multiplies the contributions of these clients by `factor`."""
    for client in built.assembly.clients:
        if client.index in clients:
            handle = client.handle

            def handled(request: Any, handle: Any = handle) -> Reply:
                reply: Reply = handle(request)
                return replace(reply, contribution=reply.contribution * factor)

            client.handle = handled  # type: ignore[method-assign]


@pytest.mark.parametrize("factor", [1e6, math.inf, math.nan])
def test_what_does_not_fit_is_zeros_of_no_weight_and_is_counted_without_a_name(factor: float) -> None:
    built = federation({**MASKED, **ACTIVE, "federation.nonfinite": "skip"})
    outgrown(built, {1, 2}, factor)
    heard = listen(built)
    seen = one_round(built)
    values = heard.values(0, "change")
    np.testing.assert_allclose(seen.means["change"], (values[0] + values[3]) / 2, atol=1e-6)
    assert seen.record["masked"]["left_out"] == 2
    assert seen.record["masked"]["survivors"] == 4
    assert seen.record["rejected"] == []
    assert "client-" not in str(seen.record)
    result = built.run()
    assert [record["masked"]["left_out"] for record in result.records] == [2, 2, 2]
    assert np.isfinite(flat(result.state.tensors)).all()


def test_nobody_is_left_out_where_everything_fits() -> None:
    assert one_round(federation(MASKED)).record["masked"]["left_out"] == 0


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [(1e6, r"client-1: .* is -?\d.* \d.*raise secure_aggregation\.range"), (math.nan, "client-1 .* not finite")],
)
def test_a_run_that_is_to_fail_of_it_says_whose_it_was_and_what_to_set(factor: float, sentence: str) -> None:
    built = federation({**MASKED, **ACTIVE, "federation.nonfinite": "fail", "secure_aggregation.range": 7.0})
    outgrown(built, {1}, factor)
    with pytest.raises(TrainingError, match=sentence) as told:
        built.run()
    assert "7" in str(told.value) or factor != 1e6, "the limit"


@pytest.mark.parametrize("factor", [1e6, math.nan])
def test_a_sum_that_everybody_is_left_out_of_is_an_error(factor: float) -> None:
    built = federation({**MASKED, "federation.nonfinite": "skip"})
    outgrown(built, {0, 1, 2, 3}, factor)
    with pytest.raises(TrainingError, match=r"no client of the cohort .*secure_aggregation\.range"):
        built.run()
