"""A short run whose clients' own examples must be fitted better at its end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from privacy.entropy import SeededEntropy
from secure_fed.runs.evaluation import evaluated
from secure_fed.runs.run import Result
from tests.secure_fed import toys

SIZES = (20, 30, 25)


def assert_learns(settings: Mapping[str, Any], **own: Any) -> Result:
    """The loss is measured on what was trained on; noise and coins come from a seed, so that chance decides nothing."""
    usual = {"federation.rounds": 8, "training.steps": 4, "training.lr": 0.02}
    test = [example for client, size in enumerate(SIZES) for example in toys.examples(client + 1, size)]
    built = toys.federation({**usual, **settings}, sizes=SIZES, test=test, entropy=SeededEntropy(5), **own)
    start = evaluated(built.assembly, built.assembly.initial)["loss"]
    result = built.run()
    assert result.records[-1]["loss"] < 0.9 * start
    return result
