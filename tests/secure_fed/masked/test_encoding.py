"""Contributions encoded as words, and decoded sums: rounding errors, norms and refusals.

With clipping and encoding included, adding a client to a secret cohort moves the sum before noise by at most the clip norm: the
real code, from local training to the sum before noise, runs twice from one state, with a cohort, and with the cohort without
one client. At these cohort sizes a grid for the realised number of clients would become coarser.

A sum that honest clients cannot make is refused: a client may lie about its own input, and the server sees the total only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.distributed import DistributedGaussian
from privacy.entropy import SeededEntropy, SystemEntropy
from privacy.mechanisms import COUNTER
from protocols.client import Client as Masking
from protocols.errors import RangeError, Tampering
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.methods import METHODS
from secure_fed.methods.method import State
from secure_fed.rounds.masked.checks import require_plausible
from secure_fed.rounds.masked.encoding_plan import Contribution, Encoding, Noised, PublicPlan, Rounded
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.contracts import runs
from tests.golden import refused
from tests.secure_fed.masked.wide_toys import CLIPPED, DISTRIBUTED, MASKED, federation, one_round, scale
from tests.secure_fed.toys import by_coins

STREAM = SeededEntropy(0).stream("none")
NAN = math.nan


def summed(encoding: Any, contributions: list[Contribution | None]) -> Contribution:
    """The decoded sum of the encoded contributions, added modulo 2^bits as in the protocol."""
    total: Any = None
    for seed, said in enumerate(contributions):
        words = encoding.encode(said, SeededEntropy(seed).stream("words"))
        assert words.dtype == (np.uint32 if encoding.plan.bits == 32 else np.uint64)
        assert words.shape == (encoding.length,)
        if encoding.largest:
            signed = words.view(f"i{words.itemsize}").astype(np.int64)
            assert np.abs(signed).max() <= encoding.largest
        total = words if total is None else total + words
    said = encoding.decode(total)
    assert isinstance(said, Contribution)
    return said


coordinates = st.floats(-1, 1, allow_nan=False, width=64)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(coordinates, min_size=5, max_size=5), min_size=1, max_size=9),
    st.floats(1e-3, 1e5),
    st.sampled_from([32, 64]),
)
def test_a_sum_is_off_by_half_a_step_for_every_client_at_most(rows: list[list[float]], bound: float, bits: int) -> None:
    values = np.array(rows) * bound
    encoding = Rounded(PublicPlan(5, bits, len(rows), bound))
    found = summed(encoding, [Contribution(row, 1.0, NAN) for row in values])
    half = len(rows) / 2 / scale(len(rows), bound, bits)
    allowed = half * (1 + 1e-9) + 1e-15 * bound * len(rows)
    assert np.abs(found.values - values.sum(0)).max() <= allowed
    assert abs(found.weight - len(rows)) <= allowed / bound
    assert math.isnan(found.loss)
    mean = found.values / found.weight
    both = (1 + np.abs(values).max() / bound) * allowed / len(rows)  # the weight is rounded, too
    assert np.abs(mean - values.mean(0)).max() <= both * (1 + 1e-6)


def test_weights_count_up_to_the_most_and_losses_once_each() -> None:
    rng = np.random.default_rng(0)
    values, weights, losses = rng.uniform(-1, 1, (4, 6)), np.array([3.0, 10.0, 50.0, 7.0]), np.array([1.0, 2, 3, 5])
    found = summed(
        Rounded(PublicPlan(6, 64, 4, 8.0), most=20.0, with_loss=True),
        [Contribution(*row) for row in zip(values, weights, losses, strict=True)],
    )
    counted = np.minimum(weights, 20)
    np.testing.assert_allclose(found.values, counted @ values, atol=1e-9)
    assert found.weight == pytest.approx(40, abs=1e-9)
    assert found.loss == pytest.approx(losses.mean(), abs=1e-9)


def test_who_says_nothing_adds_nothing() -> None:
    encoding = Rounded(PublicPlan(3, 32, 3, 8.0), with_loss=True)
    found = summed(encoding, [Contribution(np.ones(3), 1.0, 2.0), None, Contribution(np.ones(3), 1.0, NAN)])
    assert found.values.tolist() == [2.0, 2.0, 2.0]
    assert (found.weight, found.loss) == (2.0, pytest.approx(2.0, abs=1e-4))
    assert not encoding.encode(None, STREAM).any()
    nobody = summed(encoding, [None, None])
    assert nobody.weight == 0
    assert math.isnan(nobody.loss)


@every("loss", [1e9, -1e9, math.inf, -math.inf, NAN])
def test_no_loss_is_too_large_to_be_sent(loss: float) -> None:
    found = summed(Rounded(PublicPlan(1, 32, 2, 8.0), with_loss=True), [Contribution(np.ones(1), 1.0, loss)] * 2)
    assert found.values.tolist() == [2.0]
    assert abs(found.loss) == pytest.approx(1000) if math.isfinite(loss) else math.isnan(found.loss)


def test_what_is_beyond_the_bound_or_no_number_is_refused() -> None:
    encoding = Rounded(PublicPlan(2, 32, 2, 8.0))
    for bad in (8.1, -9.0, math.inf, NAN):
        with refused(RangeError):
            encoding.encode(Contribution(np.array([0.0, bad]), 1.0, NAN), STREAM)


# Clip norms.


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 300), st.integers(1, 50), st.floats(1e-3, 1e3), st.sampled_from([32, 64]), st.integers(0, 2**32 - 1)
)
def test_rounding_makes_no_admitted_contribution_longer_than_the_clip_norm(
    size: int, clients: int, clip_norm: float, bits: int, seed: int
) -> None:
    encoding = Rounded(PublicPlan(size, bits, clients, max(clip_norm, 1.0), clip_norm))
    longest = encoding.admitted()
    assert 0.99 * clip_norm <= longest <= clip_norm
    rng = np.random.default_rng(seed)
    for values in (rng.normal(size=size), np.eye(1, size)[0], np.ones(size)):
        values = values / np.linalg.norm(values) * longest * (1 - 1e-15)
        words = encoding.encode(Contribution(values, 1.0, NAN), STREAM)
        sent = words.view(f"i{words.itemsize}").astype(np.float64)[:size] / encoding.codec.scale
        assert np.linalg.norm(sent) <= clip_norm * (1 + 1e-12)


def test_too_coarse_a_grid_is_refused_and_the_setting_named() -> None:
    with refused(ConfigError, "secure_aggregation.bits"):
        PublicPlan(1_000_000, 32, 50, 1.0, 1e-4).longest()
    assert PublicPlan(1_000_000, 64, 50, 1.0, 1e-4).longest() > 0.99e-4
    assert math.isinf(PublicPlan(1_000_000, 32, 50, 8.0).longest())


# Noise.


def test_shares_of_noise_are_in_what_anybody_sends() -> None:
    mechanism = DistributedGaussian(1.0, 4, 3, 32)
    encoding = Noised(PublicPlan(500, 32, 4, 0.5, 0.5), mechanism)
    sigma = mechanism.grid(500).sigma
    for said in (None, Contribution(np.full(500, 0.5 / math.sqrt(500)), 1.0, 3.0)):
        words = encoding.encode(said, SeededEntropy(1).stream("x")).view(np.int32).astype(float)
        spread = words.std() / sigma
        assert 0.8 < spread < 1.2
    assert encoding.length == 500
    assert encoding.largest == 0
    found = summed(encoding, [Contribution(np.full(500, 0.5 / math.sqrt(500)), 1.0, 3.0)] * 4)
    assert math.isnan(found.weight)
    assert math.isnan(found.loss)
    residue = found.values - 4 * 0.5 / math.sqrt(500)
    assert residue.std() == pytest.approx(mechanism.std(0.5, 500, 4), rel=0.2)


torch.set_num_threads(1)

CLIENTS, CLIP, LR = 9, 0.5, 0.02
SIZES = (4, 8)  # cohort sizes of two rounds; a grid for 3 or 7 clients would be twice as fine
PATHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"secure_aggregation.enabled": True},
    "masked, 64 bits": {"secure_aggregation.enabled": True, "secure_aggregation.bits": 64},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method.name": name} for name in METHODS if runs.supported(name, "client")},
    "fra_lora, sketched": {"method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 4},
    "adaptive clipping": {"method.name": "fedlora", "privacy.clip_quantile": 0.5},
    "more dummies than clients": {"method.name": "fedlora", "privacy.clip_quantile": 0.5, "evaluation.dummies": 20},
    "clients vanish": {"method.name": "fedlora", "federation.vanishing": 0.1, "secure_aggregation.dropout": 0.2},
}
# One method of each way to send products: factors, sketches, iterations. `methods/test_sensitivity.py` covers clipping.
WAYS = ("fra_lora", "fra_lora, sketched", "fedpower")
QUICK = [("masked", "fra_lora, sketched"), ("masked", "clients vanish")]
# One method of every class, and the settings; for WAYS also 64-bit words, and no masks as for adaptive clipping.
AT_NIGHT = [
    *(("masked", case) for case in CASES if case in runs.OF_A_CLASS or case not in METHODS),
    *itertools.product(PATHS, WAYS),
    *(("plain", case) for case in ("adaptive clipping", "more dummies than clients")),
]
FIXED = {"federation.sampling": "fixed", "federation.cohort": 8, "federation.vanishing": 0.4}


@dataclass
class Summed:
    """One round's sums before noise by pass, and each client's contribution to them as bytes."""

    totals: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    sent: dict[tuple[str, int], bytes] = field(default_factory=dict)
    means: dict[str, Tensors] = field(default_factory=dict)


def build(case: str, path: str, **more: Any) -> Federation:
    usual = {"privacy.clip_norm": CLIP, "federation.cohort": 4, "training.steps": 1, "evaluation.dummies": 0}
    settings = by_coins({**usual, **PATHS[path], **CASES[case], **more})
    if path == "plain":
        settings.pop("secure_aggregation.dropout", None)
    train = [runs.examples(seed + 1, 3 + seed % 3) for seed in range(CLIENTS)]
    config = runs.settings(settings["method.name"], "client", **settings)
    return Federation(config, model=runs.model(), train=train, test=runs.examples(99, 4), entropy=SeededEntropy(3))


def gather(built: Federation, state: State, asked: Sequence[int], means: Mapping[str, Tensors]) -> Summed:
    """One round over these clients as the server runs it. means: if given, released means to use instead of the round's own."""
    server, found, first = built.assembly.server, Summed(), ""
    _listen(built, found.sent)
    plan = server.plan(state)
    for pass_name in plan.passes:
        request = server.request(state, plan, pass_name, LR, found.means, first)
        first = first or request.digest
        intake = server.gather(asked, request, server.layout(state, pass_name), built.assembly.transport)
        found.totals[pass_name] = dict(intake.total.total().dense().parts())
        assert {part.dtype for part in found.totals[pass_name].values()} == {torch.float64}
        found.means[pass_name] = means[pass_name] if means else server.release(intake, state, pass_name)
    return found


def _listen(built: Federation, sent: dict[tuple[str, int], bytes]) -> None:
    """Record every client's encoded words before masking, or its contribution in runs without masks."""
    if built.assembly.masks is None:
        for client in [*built.assembly.clients, *built.assembly.dummies]:
            _note(client, "handle", lambda reply: reply.contribution.to_bytes(), client.index, sent)
        return
    for member in built.assembly.masks.clients:
        _note(member, "_words", lambda made: made[0].tobytes(), member.client.index, sent)


def _note(owner: Any, name: str, read: Callable[[Any], bytes], index: int, sent: dict[tuple[str, int], bytes]) -> None:
    inner = getattr(type(owner), name).__get__(owner)

    def noting(ask: Any) -> Any:
        made, request = inner(ask), getattr(ask, "request", ask)
        if request is not None:
            sent[request.pass_name, index] = read(made)
        return made

    setattr(owner, name, noting)


def neighbours(case: str, path: str) -> Iterator[tuple[float, int, Summed, Summed]]:
    """For two rounds, since some methods change what they send: clip norm, removed client, sums with and without this client.

    Both runs of a round start from the same state and see the same means of earlier passes, since sensitivity is conditional on
    earlier releases.
    """
    whole, less = build(case, path), build(case, path)
    state = whole.assembly.initial
    dummies = [one.index for one in whole.assembly.dummies]
    for cohort in (range(CLIENTS)[: SIZES[0]], range(CLIENTS)[-SIZES[1] :]):
        gone, everybody = cohort[len(cohort) // 3], [*cohort, *dummies]
        with_it = gather(whole, state, everybody, {})
        without = gather(less, state, [client for client in everybody if client != gone], with_it.means)
        yield state.clip_norm, gone, with_it, without
        state = whole.assembly.server.apply(state, with_it.means)


@pytest.mark.parametrize(("path", "case"), chosen(itertools.product(PATHS, CASES), QUICK, nightly=AT_NIGHT))
def test_one_client_more_moves_the_sum_by_the_clip_norm_at_most_and_nobody_else(path: str, case: str) -> None:
    for clip_norm, gone, with_it, without in neighbours(case, path):
        for pass_name, total in with_it.totals.items():
            change = {name: part - without.totals[pass_name][name] for name, part in total.items()}
            assert abs(float(change.pop(COUNTER, torch.zeros(())))) <= 0.5
            moved = math.sqrt(sum(float(part.square().sum()) for part in change.values()))
            assert 0 < moved <= clip_norm, (case, pass_name)
        others = {key: words for key, words in with_it.sent.items() if key[1] != gone}
        assert others == without.sent, f"{case}: one client more changes nothing that another sends"


def test_a_member_of_a_fixed_secret_cohort_in_another_s_place_makes_nobody_else_vanish() -> None:
    answered = []
    for cohort in (range(8), range(1, 9)):  # client 8 in place of client 0
        built = build("clients vanish", "plain", **FIXED)
        answered.append({client for _, client in gather(built, built.assembly.initial, cohort, {}).sent} - {0, 8})
    assert answered[0] == answered[1] < set(range(1, 8))


# The encoders alone, on grids so coarse that a grid for the realised number would break the bound.


def moved(plan: Callable[[int], PublicPlan], clients: int) -> float:
    """How far one of `clients` clients moves the sum if the others' values lie between grid points. The clip norm is 1.

    plan: the encoders' plan, as a function of the number of clients that take part.
    """
    size = plan(clients).size
    step = 1 / plan(clients).codec.scale
    between = np.full(size, 0.5 * step * (1 + 1e-6))
    own = np.full(size, 1 / math.sqrt(size))
    sums = []
    for taking_part in (clients, clients - 1):
        encoder = Rounded(plan(taking_part))
        contributions = [Contribution(between, 1.0, math.nan), Contribution(own * encoder.admitted(), 1.0, math.nan)]
        other, last = (encoder.encode(said, SeededEntropy(0).stream("none")) for said in contributions)
        total = other * np.uint32(clients - 1)
        sums.append(encoder.decode(total + last if taking_part == clients else total).values)
    return float(np.linalg.norm(sums[0] - sums[1]))


@every(("clients", "at_least"), [(256, 1.008), (4096, 4.19)])
def test_a_grid_that_follows_the_realised_number_breaks_the_bound(clients: int, at_least: float) -> None:
    """With 300,000 coordinates and 32-bit words. A grid fixed for all 5,000 clients keeps the bound."""
    assert moved(lambda taking_part: PublicPlan(300_000, 32, taking_part, 1.0, 1.0), clients) >= at_least
    assert moved(lambda taking_part: PublicPlan(300_000, 32, 5_000, 1.0, 1.0), clients) <= 1


# A client that lies about its own input.

EIGHT = [3] * 8
LIAR = 5
Lie = Callable[[np.ndarray, float], None]  # (the liar's vector, changed in place; a coordinate's bound)


def placed(at: int, *values: float) -> Lie:
    """A lie that puts these multiples of the bound into the vector from place `at` on; it
    ends in weight, loss, and two counts."""

    def lied(numbers: np.ndarray, bound: float) -> None:
        numbers[np.arange(at, at + len(values))] = np.array(values) * bound

    return lied


PLAIN: dict[str, Lie] = {
    "minus everybody's weight": placed(-4, -7),
    "less than that": placed(-4, -9),
    "half a weight": placed(-4, 0.5),
    "9 times its bound": placed(0, 9),
    "a loss beyond all": placed(-3, 3, -6),
    "a count below nobody": placed(-1, -2),
}


def spread(numbers: np.ndarray, bound: float) -> None:
    numbers[:200] = 7.0


def lying(settings: dict[str, Any], lie: Lie, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A federation of eight clients, of which client LIAR sends a vector changed by `lie`."""
    built = federation({**MASKED, **settings}, sizes=EIGHT)
    member = built.assembly.masks.clients[LIAR]  # type: ignore[union-attr]
    honest = member._words
    monkeypatch.setattr(Masking, "_check_vector", lambda self, vector: None)

    def words(stage: Any) -> Any:
        sent, seconds = honest(stage)
        terms = built.assembly.masks.sums.terms  # type: ignore[union-attr]
        encoding: Any = terms.encoding(
            built.assembly.server.layout(built.assembly.initial, "change").size, built.assembly.initial.clip_norm
        )
        scale = (
            encoding.codec.scale if isinstance(encoding, Rounded) else encoding.mechanism.grid(encoding.plan.size).unit
        )
        numbers = np.zeros(len(sent)) + sent.view(np.int32) / scale
        lie(numbers, encoding.plan.bound if isinstance(encoding, Rounded) else 1.0)
        return np.rint(numbers * scale).astype(np.int64).astype(np.int32).view(np.uint32), seconds

    member._words = words
    return built


@pytest.mark.parametrize("what", PLAIN)
def test_a_sum_that_honest_clients_cannot_make_is_refused(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(Tampering, hide=r"\d+\.\d{2,}"):
        one_round(lying({}, PLAIN[what], monkeypatch))


@pytest.mark.parametrize("settings", [CLIPPED, DISTRIBUTED], ids=["central", "distributed"])
def test_a_sum_that_is_longer_than_all_clip_norms_is_refused(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The vector is within every coordinate's bound, so the protocol accepts it."""

    with refused(Tampering, hide=r"\d+\.\d+"):
        one_round(lying({**settings, "federation.sampling": "fixed"}, spread, monkeypatch))


def test_on_many_machines_a_sum_that_a_client_spoiled_costs_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    built = lying({**CLIPPED, "federation.sampling": "fixed"}, spread, monkeypatch)
    server = built.assembly.server
    sums = replace(server.summing, loses_aborted=True)
    built.assembly = replace(built.assembly, server=replace(server, summing=sums))
    seen = one_round(built)
    assert "long, which 8 honest contributors cannot make" in seen.record["lost"]
    assert seen.record["masked"]["bytes_up"] > 0
    before = built.assembly.initial.tensors
    assert all(torch.equal(seen.after.tensors.tensor(name), before.tensor(name)) for name in before)


@pytest.mark.parametrize("length", [0.9, 1.4])
def test_under_the_server_s_noise_a_sum_without_it_is_not_judged(
    length: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight honest clients together are within 0.8. A refusal without noise would tell the liar on which side of this limit its
    lie put the sum, and so something about the other clients' sum that no noise hides."""

    def longer(numbers: np.ndarray, bound: float) -> None:
        numbers[:100] = length / 10

    built = lying({**CLIPPED, "federation.sampling": "fixed"}, longer, monkeypatch)
    assert one_round(built).after.tensors.is_finite()


def test_a_lie_within_the_bounds_of_all_is_not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the threat table says: a client can exceed its bound by up to the number of clients."""
    seen = one_round(lying({}, placed(0, 6), monkeypatch))
    assert np.abs(seen.means["change"]).max() > 5


ENCODINGS: dict[str, Encoding] = {
    "rounded": Rounded(PublicPlan(300, 32, 9, 1.5), with_loss=True),
    "clipped": Rounded(PublicPlan(300, 32, 9, 1.0, 0.3)),
    "weighted": Rounded(PublicPlan(300, 32, 9, 1.5), most=1000.0, with_loss=True),
    "long words": Rounded(PublicPlan(300, 64, 9, 1.5), with_loss=True),
    "noised": Noised(PublicPlan(300, 32, 9, 0.3, 0.3), DistributedGaussian(0.3, 9, 9)),
}


@every("name", ENCODINGS)
def test_honest_sums_at_the_very_bounds_are_not_refused(name: str) -> None:
    """Contributions of the largest norm, all in one direction, from all clients, from some or from none."""
    encoding, rng = ENCODINGS[name], np.random.default_rng(1)
    longest = encoding.admitted()
    for trial in range(24):
        values = rng.standard_normal(300) if trial % 2 else np.eye(300)[trial]
        values *= (longest if math.isfinite(longest) else 1.0) / np.linalg.norm(values)
        if trial % 3 == 0 and name in ("rounded", "weighted", "long words"):
            values = np.full(300, 1.5)
        spoken = int(rng.integers(0, 10)) if trial else 9
        weight = float(rng.integers(1, 1200)) if name == "weighted" else 1.0
        stream = SystemEntropy().stream("share")
        words = [
            encoding.encode(Contribution(values, weight, 1e6) if client < spoken else None, stream)
            for client in range(9)
        ]
        require_plausible(encoding.decode(np.sum(words, 0, dtype=words[0].dtype)), encoding, 9)


def test_a_noised_sum_may_be_as_long_as_its_clients_make_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is for six clients: dummies are added to the sum that was checked."""
    built = federation(
        {**MASKED, **CLIPPED, "evaluation.dummies": 20, "federation.cohort": 6, "federation.sampling": "fixed"},
        sizes=[2] * 12,
    )
    limits: list[int] = []
    judge = "secure_fed.rounds.masked.server.require_plausible_release"
    monkeypatch.setattr(judge, lambda *given: limits.append(given[3]))
    one_round(built)
    assert limits == [6]


def test_a_clip_norm_that_adaptive_clipping_may_come_to_is_checked_before_the_run() -> None:
    settings = {**MASKED, **CLIPPED, "privacy.clip_quantile": 0.5, "federation.rounds": 60}
    with refused(ConfigError, "secure_aggregation.bits"):
        federation(settings)
    assert federation({**settings, "secure_aggregation.bits": 64}).assembly.masks
    assert federation({**settings, "federation.rounds": 3}).assembly.masks


def test_the_number_of_lost_rounds_is_withheld() -> None:
    """With a secret cohort it would reveal whether a client that deals wrong shares was drawn."""
    found = federation({**MASKED, **CLIPPED, "federation.rounds": 1}).run()
    assert found.summary["secure_aggregation"]["rounds_lost"] is None
    assert found.whole["secure_aggregation"]["rounds_lost"] == 0
