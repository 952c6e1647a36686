"""FedARA in whole runs: tensors and bytes shrink, and masks, privacy, resuming and export still work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from privacy.entropy import SeededEntropy
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.triplet import kept, triplets
from secure_fed.methods.method import State
from secure_fed.runs.directory import read_config
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Layout, Tensors
from tests.cells import chosen
from tests.contracts.runs import KilledAfter, KilledError, States
from tests.secure_fed import private_toys, toys
from tests.secure_fed.methods.test_fedara import ranks

ROUNDS = 6
MASKED = {"secure_aggregation.enabled": True}
PRIVACY: tuple[dict[str, Any], ...] = (
    {"privacy.unit": "example", "privacy.noise_multiplier": 0.3, "privacy.delta": 1e-3},
    {"privacy.unit": "client", "privacy.noise_multiplier": 0.02, "privacy.delta": 1e-3},
    {**private_toys.NOISE, "privacy.noise": "distributed", **MASKED},
)


def settings(**more: Any) -> dict[str, Any]:
    """Settings for two matrices of rank 4, eight ranks in all; the budget is two ranks after four rounds."""
    own = {"rank": 4, "warmup_rounds": 1, "final_rounds": 2}
    usual = {"method.name": "fedara", "federation.rounds": ROUNDS, **{f"method.{k}": v for k, v in own.items()}}
    return {**usual, "training.steps": 3, **more}


def federation(seed: int | None = None, callbacks: Any = (), **more: Any) -> Federation:
    entropy = None if seed is None else SeededEntropy(seed)
    return toys.federation(settings(**more), callbacks=callbacks, entropy=entropy)


def run(**more: Any) -> tuple[Result, list[State]]:
    kept = States()
    return federation(3, [kept], **more).run(), kept.after


def test_ranks_fall_and_bytes_with_them() -> None:
    result, states = run()
    live = [8, *(sum(ranks(state.tensors)) for state in states)]
    assert live == sorted(live, reverse=True)
    assert live[0] == live[1] == 8 > live[-1]
    assert [row["ranks"] for row in result.records] == live[1:], "as in the state after the round"
    down = [row["bytes_down"] for row in result.records]
    for row, before in zip(down, [federation().assembly.initial, *states[:-1]], strict=True):
        assert row == 3 * before.tensors.wire_size
    up = [row["bytes_up"] for row in result.records]
    assert (down[-1], up[-1]) < (down[0], up[0])
    votes = [ballots(before) for before in states[:-1]]
    assert all(
        sent == 3 * (before.tensors | cast).wire_size
        for sent, before, cast in zip(up[1:], states[:-1], votes, strict=True)
    )


def ballots(state: State) -> Tensors:
    """A ballot tensor for every module with live ranks; only its size matters."""
    found = ((f"{t.module}.votes", state.tensors.tensor(t.e)) for t in triplets(state.tensors))
    return Tensors((name, cast) for name, cast in found if len(cast))


@pytest.mark.parametrize("masks", chosen(["votes", "global"], ["votes"]))
def test_behind_masks_a_run_ends_where_it_does_in_the_open(masks: str) -> None:
    """The masked sums shrink with the ranks and contain the votes."""
    (_, plain), (result, masked) = (run(**{"method.masks": masks, **more}) for more in ({}, MASKED))
    for one, other in zip(plain, masked, strict=True):
        assert Layout.of(one.tensors) == Layout.of(other.tensors)
        assert (one.tensors - other.tensors).norm() < 1e-3
    assert len({state.tensors.numel for state in masked}) > 2
    up = [row["bytes_up"] for row in result.records]
    assert up[-1] < up[1]


@pytest.mark.parametrize(
    ("until", "more"),
    chosen(
        [
            *((until, {}) for until in (1, 3, 5)),
            (3, MASKED),
            (3, {"method.masks": "global"}),
            *((3, privacy) for privacy in PRIVACY),
        ],
        [(3, {})],
    ),
)
def test_a_run_that_was_ended_goes_on_to_the_same_bits(until: int, more: dict[str, Any], tmp_path: Path) -> None:
    """The checkpoint's tensors have other shapes than the tensors of a new model."""
    whole, _ = run(**more)
    with pytest.raises(KilledError):
        federation(3, [KilledAfter(until)], **more).run(tmp_path / "run")
    resumed = federation(3, **more).run(tmp_path / "run", resume=True)
    assert resumed.state.tensors.to_bytes() == whole.state.tensors.to_bytes()
    assert [row["bytes_up"] for row in resumed.records] == [row["bytes_up"] for row in whole.records]


def test_resuming_with_more_rounds_leaves_the_phases_where_they_were(tmp_path: Path) -> None:
    federation(3, **{"method.warmup_rounds": None, "method.final_rounds": None, "federation.rounds": 2}).run(tmp_path)
    held = read_config(tmp_path).method
    assert (held.warmup_rounds, held.final_rounds) == (0, 0)
    phases = {"method.warmup_rounds": 0, "method.final_rounds": 0}
    longer = federation(3, **{**phases, "federation.rounds": 8}).run(tmp_path, resume=True)
    assert longer.state.round == 8
    assert sum(ranks(longer.state.tensors)) <= 2


def test_a_federation_runs_again_from_the_whole_after_it_has_shrunk() -> None:
    built = federation()
    first = built.run()
    assert sum(ranks(first.state.tensors)) < 8
    again = built.run()
    assert again.state.tensors.to_bytes() == first.state.tensors.to_bytes()
    assert toys.without_time(again.records) == toys.without_time(first.records)


def test_clients_weighed_by_their_examples_have_as_many_votes() -> None:
    """Weights are 5, 8 and 11: the largest client alone (11 of 24) has no majority, two clients such as 11 + 8 do.

    Each client has a head of its own.
    """
    kept = States()
    built = federation(None, [kept], **{"federation.weighting": "examples", "method.personal": ["classifier.*"]})
    seen: list[tuple[Tensors, float]] = []
    for client in built.assembly.clients:
        handle = client.handle

        def handled(request: Any, handle: Any = handle) -> Any:
            reply = handle(request)
            if request.round == 1:
                seen.append((reply.contribution, reply.weight))
            return reply

        client.handle = handled  # type: ignore[method-assign]
    assert built.run().state.round == ROUNDS
    assert [weight for _, weight in seen] == [5.0, 8.0, 11.0]
    for triplet, left in zip(triplets(built.assembly.initial.tensors), ranks(kept.after[1].tensors), strict=True):
        name = f"{triplet.module}.votes"
        share = torch.stack([sent.tensor(name) * weight for sent, weight in seen]).sum(0) / 24
        assert left == int((share > 0.5).sum())


def test_an_export_has_the_ranks_that_are_left(tmp_path: Path) -> None:
    """Three ranks in one matrix, none in the other."""
    built = federation()
    state = built.run().state
    generator = torch.Generator().manual_seed(0)
    whole = Tensors((n, torch.randn(m.shape, generator=generator)) for n, m in built.assembly.initial.tensors.items())
    live = {"query": torch.zeros(4, dtype=torch.bool), "value": torch.tensor([True, False, True, True])}
    state = replace(state, tensors=kept(whole, live))
    built.export(state, tmp_path / "adapter")
    x = torch.stack([example["x"] for example in toys.examples(5, 4)])
    with torch.no_grad():
        expected = built.load(state).eval()(x)
        loaded = PeftModel.from_pretrained(toys.model(), tmp_path / "adapter").eval()
        assert torch.allclose(loaded(x), expected, atol=1e-4)
        assert not torch.allclose(toys.model()(x), expected, 0.1)
    assert {n: tuple(p.shape) for n, p in loaded.named_parameters() if "lora_A" in n} == {
        "base_model.model.value.lora_A.default.weight": (3, 8)
    }
