"""FedARA's schedule, votes and pruning, round by round against computations by hand, and the shapes that its tensors may have.

In whole runs tensors and bytes shrink, and masks, resuming and export still work; `tests/contracts` adds privacy.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel

from privacy.entropy import SeededEntropy
from secure_fed.federation import Federation
from secure_fed.learning.models.adapters.triplet import kept, triplets
from secure_fed.methods import build
from secure_fed.methods.fedara import Budget, FedAra, elected, foremost
from secure_fed.methods.method import CHANGE, Shrinking, State, fits
from secure_fed.runs.directory import read_config
from secure_fed.runs.run import Result
from secure_fed.tensors.tensors import Layout, LowRank, Tensors
from tests.contracts.runs import KilledAfter, KilledError, States
from tests.secure_fed import toys
from tests.secure_fed.methods.rounds import means_of, one_round, start, trained


def method_of(**more: Any) -> FedAra:
    """For four adapted matrices of a small BERT: a budget of 16, 10, 7, 5, 4, 4, 4 ranks after rounds 1 to 7."""
    usual = {"rank": 4, "alpha": 8.0, "warmup_rounds": 1, "final_rounds": 1}
    own = {"method.name": "fedara", "federation.rounds": 7, **{f"method.{name}": v for name, v in usual.items()}}
    method = build(toys.config(own | more))
    assert isinstance(method, FedAra)
    return method


def ranks(tensors: Tensors) -> list[int]:
    return [tensors[triplet.e].shape[0] for triplet in triplets(tensors)]


# The schedule.


def test_the_papers_budget() -> None:
    """From rank 12 to rank 3 in 36 matrices over 100 rounds, with 5 rounds of warm-up and 50 final rounds; computed exactly."""
    budget = Budget(first=12, last=3, warmup=5, final=50, rounds=100)
    wanted = {0: 432, 4: 432, 5: 432, 6: 411, 14: 274, 20: 204, 27: 151, 35: 120, 45: 108, 49: 108, 50: 108, 100: 108}
    assert {t: budget.ranks(t, 36) for t in wanted} == wanted
    assert [Budget(4, 1, 1, 1, 7).ranks(t, 4) for t in range(8)] == [16, 16, 10, 7, 5, 4, 4, 4]


@given(
    st.integers(1, 12), st.integers(1, 12), st.integers(0, 6), st.integers(0, 6), st.integers(1, 9), st.integers(1, 20)
)
def test_the_budget_falls_from_all_to_the_least(
    first: int, last: int, warmup: int, final: int, between: int, modules: int
) -> None:
    last = min(first, last)
    rounds = warmup + final + between
    budget = Budget(first, last, warmup, final, rounds)
    found = [budget.ranks(t, modules) for t in range(rounds + 1)]
    assert found == sorted(found, reverse=True)
    assert found[: warmup + 1] == [first * modules] * (warmup + 1)
    assert found[rounds - final :] == [last * modules] * (final + 1)
    for t in range(warmup, rounds - final):
        cubed = ((rounds - final - t) / between) ** 3
        assert abs(found[t] - modules * (last + (first - last) * cubed)) <= 0.5 + 1e-9


# Votes and pruning.


def test_the_foremost_of_all_modules_together() -> None:
    scores = {"m": torch.tensor([3.0, 1.0]), "none": torch.zeros(0), "n": torch.tensor([2.0, 3.0, 1.0])}
    found = {name: mask.tolist() for name, mask in foremost(scores, 2).items()}
    assert found == {"m": [True, False], "none": [], "n": [False, True, False]}
    assert foremost(scores, 4)["m"].tolist() == [True, True], "the first of equals"
    assert foremost(scores, 4)["n"].tolist() == [True, True, False]
    assert all(mask.all() for mask in foremost(scores, 99).values())


def test_more_than_the_threshold_elects() -> None:
    shares = {"m": torch.tensor([0.5, 0.75]), "n": torch.tensor([0.500001, 0.25, 1.0])}
    assert [mask.tolist() for mask in elected(shares, 0.5).values()] == [[False, True], [False, False, True]]
    assert [mask.tolist() for mask in elected(shares, 0.0).values()] == [[True, True], [True, True, True]]
    torn = {"m": torch.tensor([0.25, 0.5]), "n": torch.tensor([0.5])}
    assert [mask.tolist() for mask in elected(torn, 0.5).values()] == [[False, True], [False]], "the one with most"


def by_hand(state: State, afters: list[Tensors], budget: int, threshold: float) -> Tensors:
    """The mean factors, restricted to the ranks with enough votes, computed with loops."""
    names = triplets(state.tensors)
    votes: dict[tuple[int, int], int] = {}
    for after in afters:
        scores = []
        for place, t in enumerate(names):
            a, e, b = (after.tensor(name) for name in (t.a, t.e, t.b))
            for i in range(len(e)):
                score = (
                    abs(float(e[i])) + float(b[:, i].abs().sum()) / b.shape[0] + float(a[i].abs().sum()) / a.shape[1]
                )
                scores.append((score, place, i))
        for _, place, i in sorted(scores, reverse=True)[:budget]:
            votes[place, i] = votes.get((place, i), 0) + 1
    found = {name: torch.stack([after.tensor(name) for after in afters]).mean(0) for name in state.tensors}
    for place, t in enumerate(names):
        live = [i for i in range(len(found[t.e])) if votes.get((place, i), 0) > threshold * len(afters)]
        found |= {t.a: found[t.a][live], t.e: found[t.e][live], t.b: found[t.b][:, live]}
    return Tensors(found)


@pytest.mark.parametrize("threshold", [0.25, 0.5, 0.75])
def test_a_round_by_hand(threshold: float) -> None:
    method = method_of(**{"method.vote_threshold": threshold})
    state = one_round(method, start(method))
    pruned = 0
    for budget in (10, 7, 5):
        afters = [trained(method, state, 10 * state.round + client, 0.05) for client in range(4)]
        want = by_hand(state, afters, budget, threshold)
        following = method.apply(state, means_of(method, state, afters))
        assert Layout.of(following.tensors) == Layout.of(want)
        assert (following.tensors - want).norm() < 1e-5
        pruned += sum(ranks(state.tensors)) - sum(ranks(following.tensors))
        state = following
    assert pruned


def test_what_travels_round_by_round() -> None:
    method = method_of()
    state = start(method)
    adapter = {name for triplet in triplets(state.tensors) for name in triplet[1:]}
    for round_, budget in enumerate([16, 10, 7, 5, 4, 4, 4]):
        plan = method.plan(state)
        assert plan.passes == ((f"{CHANGE} and votes for {budget}",) if budget < 16 else (CHANGE,))
        assert set(plan.trainable) == set(plan.down) == set(state.tensors)
        before = state.tensors
        contribution = method.contribute(plan.passes[0], before, trained(method, state, round_), {})
        assert Layout.of(contribution) == method.layout(state, plan.passes[0])
        votes = {name for name in contribution if name not in before}
        assert votes == (
            {f"{t.module}.votes" for t in triplets(before) if len(before.tensor(t.e))} if budget < 16 else set()
        )
        if votes:
            cast = torch.cat([contribution.tensor(name) for name in votes])
            assert set(cast.tolist()) <= {0.0, 1.0}
            assert cast.sum() == min(budget, sum(ranks(before)))
        state = one_round(method, state)
        assert Layout.of(state.tensors.without(adapter)) == Layout.of(before.without(adapter))
        assert all(now <= then for now, then in zip(ranks(state.tensors), ranks(before), strict=True)), "never revived"
        assert 1 <= sum(ranks(state.tensors)) <= min(16, 2 * budget)
    assert sum(ranks(state.tensors)) < 16


def test_with_global_masks_the_server_keeps_the_foremost_of_the_mean() -> None:
    method = method_of(**{"method.masks": "global"})
    state = start(method)
    for budget in (16, 10, 7, 5, 4, 4, 4):
        afters = [trained(method, state, 10 * state.round + client, 0.05) for client in range(4)]
        assert method.plan(state).passes == (CHANGE,)
        assert method.layout(state, CHANGE) == Layout.of(state.tensors)
        means = means_of(method, state, afters)
        mean = (afters[0] + afters[1] + afters[2] + afters[3]) * 0.25
        following = method.apply(state, means)
        want = by_hand(State(mean), [mean], budget, 0.5)
        assert (following.tensors - want).norm() < 1e-5
        assert sum(ranks(following.tensors)) == budget
        state = following


def test_where_nobody_voted_the_server_decides() -> None:
    """With an empty cohort all means are zero, votes included, and no rank would be elected."""
    method, other = method_of(), method_of(**{"method.masks": "global"})
    state = one_round(method, start(method))
    (pass_name,) = method.plan(state).passes
    empty = Layout.unflatten(method.layout(state, pass_name), torch.zeros(method.layout(state, pass_name).size))
    found = method.apply(state, {pass_name: empty}).tensors
    still = Layout.unflatten(other.layout(state, CHANGE), torch.zeros(other.layout(state, CHANGE).size))
    assert found.to_bytes() == other.apply(state, {CHANGE: still}).tensors.to_bytes()
    assert sum(ranks(found)) == 10


# The shapes that a state may have.


def test_every_state_of_a_run_is_admitted_after_its_rounds_and_none_too_early() -> None:
    for masks in ("votes", "global"):
        method = method_of(**{"method.masks": masks})
        assert isinstance(method, Shrinking)
        first = start(method)
        state = first
        for _ in range(7):
            state = one_round(method, state)
            assert method.admits(state.round, first.tensors, state.tensors)
            assert fits(method, first.tensors, state)
            if sum(ranks(state.tensors)) < 16:
                assert not method.admits(1, first.tensors, state.tensors), "in the warm-up"
        assert not method.admits(7, first.tensors, first.tensors), "after the last"


def reshaped(tensors: Tensors, changes: dict[str, tuple[int, ...]]) -> Tensors:
    return tensors | {name: torch.zeros(shape) for name, shape in changes.items()}


def test_shapes_that_are_no_state_are_not_admitted() -> None:
    method = method_of()
    initial = start(method).tensors
    one, two, *_ = triplets(initial)
    honest = reshaped(initial, {one.a: (1, 16), one.e: (1,), one.b: (16, 1)})
    assert method.admits(2, initial, honest)
    assert not method.admits(0, initial, honest)
    assert method.admits(0, initial, initial)
    wrong: tuple[dict[str, tuple[int, ...]], ...] = (
        {one.a: (2, 16)},  # another number of ranks than E and B
        {one.e: (2,)},
        {one.b: (16, 2)},
        {one.a: (1, 15)},
        {one.e: (1, 1)},
        {one.e: ()},
        {two.a: (5, 16), two.e: (5,), two.b: (16, 5)},  # more ranks than at the start
        {"classifier.weight": (2, 16)},
    )
    for changes in wrong:
        assert not method.admits(2, initial, reshaped(honest, changes)), changes
    none: dict[str, tuple[int, ...]] = {}
    for t in triplets(initial):
        none |= {t.a: (0, 16), t.e: (0,), t.b: (16, 0)}
    assert not method.admits(6, initial, reshaped(initial, none)), "one always stays"
    assert not method.admits(2, initial, honest.without([one.e]))
    assert not method.admits(2, initial, honest | {"x": torch.zeros(1)})
    assert not method.admits(2, initial, honest | {one.e: LowRank(torch.zeros(1, 1), torch.zeros(1, 1))})


# Whole runs.


ROUNDS = 6
MASKED = {"secure_aggregation.enabled": True}


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


@pytest.fixture(scope="module")
def whole() -> tuple[Result, list[State]]:
    return run()


def test_ranks_fall_and_bytes_with_them(whole: tuple[Result, list[State]]) -> None:
    result, states = whole
    live = [8, *(sum(ranks(state.tensors)) for state in states)]
    assert live == sorted(live, reverse=True)
    assert live[0] == live[1] == 8 > live[-1]
    assert [row["ranks"] for row in result.records] == live[1:], "as in the state after the round"
    down = [row["bytes_down"] for row in result.records]
    for row, before in zip(down, [federation().assembly.initial, *states[:-1]], strict=True):
        assert row == 3 * before.tensors.wire_size
    up = [row["bytes_up"] for row in result.records]
    assert (down[-1], up[-1]) < (down[0], up[0])
    for sent, before in zip(up[1:], states[:-1], strict=True):
        assert sent == 3 * (before.tensors | ballots(before)).wire_size


def ballots(state: State) -> Tensors:
    """A ballot tensor for every module with live ranks; only its size matters."""
    found = ((f"{t.module}.votes", state.tensors.tensor(t.e)) for t in triplets(state.tensors))
    return Tensors((name, cast) for name, cast in found if len(cast))


def test_behind_masks_a_run_ends_where_it_does_in_the_open(whole: tuple[Result, list[State]]) -> None:
    """The masked sums shrink with the ranks and contain the votes."""
    result, masked = run(**MASKED)
    for one, other in zip(whole[1], masked, strict=True):
        assert Layout.of(one.tensors) == Layout.of(other.tensors)
        assert (one.tensors - other.tensors).norm() < 1e-3
    assert len({state.tensors.numel for state in masked}) > 2
    up = [row["bytes_up"] for row in result.records]
    assert up[-1] < up[1]


def test_a_run_that_was_ended_goes_on_to_the_same_bits(whole: tuple[Result, list[State]], tmp_path: Path) -> None:
    """The checkpoint's tensors have other shapes than the tensors of a new model."""
    with pytest.raises(KilledError):
        federation(3, [KilledAfter(3)]).run(tmp_path / "run")
    resumed = federation(3).run(tmp_path / "run", resume=True)
    assert resumed.state.tensors.to_bytes() == whole[0].state.tensors.to_bytes()
    assert [row["bytes_up"] for row in resumed.records] == [row["bytes_up"] for row in whole[0].records]


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
