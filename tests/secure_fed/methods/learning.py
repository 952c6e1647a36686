"""A check that a short run learns: the loss on the clients' own examples must fall."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from privacy.entropy import SeededEntropy
from secure_fed.runs.evaluation import evaluated
from secure_fed.runs.run import Result
from tests.secure_fed import toys

SIZES = (20, 30, 25)


def assert_learns(settings: Mapping[str, Any], **own: Any) -> Result:
    """Asserts that the loss on the training examples falls by a tenth. Noise and sampling are seeded: the outcome is fixed."""
    usual = {"federation.rounds": 8, "training.steps": 4, "training.lr": 0.02}
    test = [example for client, size in enumerate(SIZES) for example in toys.examples(client + 1, size)]
    built = toys.federation({**usual, **settings}, sizes=SIZES, test=test, entropy=SeededEntropy(5), **own)
    start = evaluated(built.assembly, built.assembly.initial)["loss"]
    result = built.run()
    assert result.records[-1]["loss"] < 0.9 * start
    return result
