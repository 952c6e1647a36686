"""The noise that a server knows to be in updates and sums, compared with the noise of runs and of encoded sums."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from attacks.adversary.case import Case, Seen, seen
from attacks.texts.recovery import grid_noise, sum_noise, update_noise
from privacy.entropy import SeededEntropy
from secure_fed import Federation, RunConfig
from secure_fed.rounds.masked.encoding_plan import Contribution
from secure_fed.runs import recording
from secure_fed.runs.recording import Summed
from secure_fed.tensors.tensors import Tensors
from tests.attacks import canaried
from tests.secure_fed import toys

STEPS: dict[str, Any] = {
    "privacy.unit": "example",
    "privacy.noise_multiplier": 30.0,  # so that the gradients are small beside it
    "privacy.clip_norm": 0.1,
    "privacy.delta": 1e-3,
    "evaluation.dummies": 0,
    "evaluation.record": "updates",
    "federation.rounds": 1,
    "method.rank": 16,
    "training.steps": None,
    "training.optimizer": "sgd",
    "training.lr": 0.01,
}
SIZE = 20_000


def private(run_dir: Path, each: int, **training: Any) -> Case:
    """A server's view of two clients with `each` examples, whose steps are private."""
    settings = STEPS | {f"training.{name}": value for name, value in training.items()}
    train = [canaried.examples(client, each) for client in (1, 2)]
    parts = {"model": canaried.wide(), "train": train, "test": canaried.examples(9, 20), "entropy": SeededEntropy(0)}
    built = Federation(toys.config(settings), **parts)
    final = built.run(run_dir).state.tensors
    return Case(built.assembly, seen("server", final, recording.read(run_dir)), canaried.never)


def spread(tensors: Tensors) -> float:
    """The standard deviation of the adapters' numbers; the head, which has another rate, is left out."""
    return float(torch.cat([tensors.tensor(name).flatten() for name in tensors if "classifier" not in name]).std())


@pytest.mark.parametrize(
    ("each", "training"),
    [
        (3, {"batch_size": 8}),  # the expected batch is 3, and not 8
        (6, {"batch_size": 2, "epochs": 2}),  # six steps, and not two
        (4, {"batch_size": 2, "epochs": 3, "momentum": 0.8, "lr_schedule": "linear"}),
    ],
)
def test_the_noise_of_private_steps_is_that_of_a_runs_updates(tmp_path: Path, each: int, training: Any) -> None:
    ran = private(tmp_path / "run", each, **training)
    for one in ran.seen.updates:
        assert spread(one.contribution) == pytest.approx(update_noise(ran, each, 0), rel=0.05)
    (total,) = ran.seen.sums
    assert spread(total.total) == pytest.approx(sum_noise(ran, total), rel=0.05)


def test_the_noise_of_private_steps_of_adamw_is_not_counted(tmp_path: Path) -> None:
    ran = private(tmp_path / "run", 3, optimizer="adamw")
    assert update_noise(ran, 3, 0) == sum_noise(ran, ran.seen.sums[0]) == 0.0


CLIENTS: dict[str, Any] = {
    "privacy__unit": "client",
    "privacy__noise_multiplier": 1.0,
    "privacy__clip_norm": 0.1,
    "evaluation__dummies": 0,
}


def masked(**settings: Any) -> Case:
    """The view of a server behind masks before the first round."""
    usual = {
        "data.examples": 80,
        "data.test_examples": 40,
        "federation.clients": 20,
        "federation.cohort": 10,
        "secure_aggregation.enabled": True,
    }
    chosen = usual | {name.replace("__", "."): value for name, value in settings.items()}
    config = RunConfig().replace({tuple(name.split(".", 1)): value for name, value in chosen.items()})  # type: ignore[misc]
    return Case(Federation(config).assembly, Seen("secure_server", Tensors()), canaried.never)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"federation__sampling": "poisson"},  # a grid for 20 places
        {"federation__weighting": "examples"},
        CLIENTS,
        CLIENTS | {"privacy__noise": "distributed"},
    ],
)
def test_the_noise_of_a_masked_sum_is_that_of_encoded_contributions(settings: dict[str, Any]) -> None:
    """The sum of ten contributions, encoded and decoded as behind masks, is off by as much as the attack counts."""
    of = masked(**settings)
    protection, terms = of.assembly.protection, of.assembly.masks.sums.terms  # type: ignore[union-attr]
    encoding = terms.encoding(SIZE, protection.clip_norm)
    rng = np.random.default_rng(0)
    longest = min(1.0, protection.clip_norm)
    values = rng.normal(size=(10, SIZE)) * 0.9 * longest / math.sqrt(SIZE)
    words = [
        encoding.encode(Contribution(one, terms.most_weight, math.nan), SeededEntropy(0).stream("share", i))
        for i, one in enumerate(values)
    ]
    off = encoding.decode(sum(words[1:], words[0])).values - terms.most_weight * values.sum(0)
    one = Summed(0, "change", Tensors({"w": torch.zeros(SIZE)}), 10.0, 10)
    assert float(off.std()) == pytest.approx(math.hypot(sum_noise(of, one), grid_noise(of, one)), rel=0.08)
