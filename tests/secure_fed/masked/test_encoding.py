"""Contributions encoded as words, and decoded sums: rounding errors, norms and refusals.

With clipping and encoding included, adding a client to a secret cohort moves the sum before noise by at most the clip norm: the
real code, from local training to the sum before noise, runs twice from one state, with a cohort, and with the cohort without
one client. At these cohort sizes a grid for the realised number of clients would become coarser.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.distributed import DistributedGaussian
from privacy.entropy import SeededEntropy
from privacy.mechanisms import COUNTER
from protocols.errors import RangeError
from secure_fed.errors import ConfigError
from secure_fed.federation import Federation
from secure_fed.methods import METHODS
from secure_fed.methods.method import State
from secure_fed.rounds.masked.encoding_plan import Contribution, Noised, PublicPlan, Rounded
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen, every
from tests.contracts import runs
from tests.golden import refused
from tests.secure_fed.masked.wide_toys import scale
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


def test_everybody_at_the_bound_does_not_wrap_around() -> None:
    for n in (1, 2, 3, 7, 1000):
        for sign in (-1, 1):
            encoding = Rounded(PublicPlan(2, 32, n, 7.3), with_loss=True)
            found = summed(encoding, [Contribution(np.full(2, sign * 7.3), 1.0, sign * 64.0)] * n)
            np.testing.assert_allclose(found.values, sign * 7.3 * n, rtol=1e-5)
            assert found.loss == pytest.approx(sign * 64, rel=1e-5)


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
QUICK = [("masked", "fra_lora, sketched")]
# One method of every class, and the settings; for WAYS also 64-bit words and no masks.
AT_NIGHT = [
    *(("masked", case) for case in CASES if case in runs.OF_A_CLASS or case not in METHODS),
    *itertools.product(PATHS, WAYS),
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


def require_bounded(case: str, path: str) -> None:
    for clip_norm, gone, with_it, without in neighbours(case, path):
        for pass_name, total in with_it.totals.items():
            change = {name: part - without.totals[pass_name][name] for name, part in total.items()}
            assert abs(float(change.pop(COUNTER, torch.zeros(())))) <= 0.5
            moved = math.sqrt(sum(float(part.square().sum()) for part in change.values()))
            assert 0 < moved <= clip_norm, (case, pass_name)
        others = {key: words for key, words in with_it.sent.items() if key[1] != gone}
        assert others == without.sent, f"{case}: one client more changes nothing that another sends"


@pytest.mark.parametrize(
    ("case", "path"),
    chosen(
        [
            ("adaptive clipping", "plain"),
            ("clients vanish", "masked"),
            ("more dummies than clients", "plain"),
            ("more dummies than clients", "masked"),
        ],
        [("adaptive clipping", "plain"), ("clients vanish", "masked")],
    ),
)
def test_one_client_more_moves_the_sum_by_the_clip_norm_at_most_and_nobody_else(case: str, path: str) -> None:
    require_bounded(case, path)


def test_a_member_of_a_fixed_secret_cohort_in_another_s_place_makes_nobody_else_vanish() -> None:
    answered = []
    for cohort in (range(8), range(1, 9)):  # client 8 in place of client 0
        built = build("clients vanish", "plain", **FIXED)
        answered.append({client for _, client in gather(built, built.assembly.initial, cohort, {}).sent} - {0, 8})
    assert answered[0] == answered[1] < set(range(1, 8))


@pytest.mark.parametrize(("path", "case"), chosen(itertools.product(PATHS, CASES), QUICK, nightly=AT_NIGHT))
def test_in_every_method_s_own_space(path: str, case: str) -> None:
    require_bounded(case, path)


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
