"""Adding a client to a secret cohort moves the sum before noise by at most the clip norm, with clipping and encoding included.

The real code, from local training to the sum before noise, runs twice from one state: with a cohort, and with the cohort
without one client. At these cohort sizes a grid for the realised number of clients would become coarser.
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

from privacy.entropy import SeededEntropy
from privacy.mechanisms import COUNTER
from secure_fed.federation import Federation
from secure_fed.methods import METHODS
from secure_fed.methods.method import State
from secure_fed.rounds.masked.encoding import Contribution, PublicPlan, Rounded
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.contracts import runs
from tests.secure_fed.toys import by_coins

torch.set_num_threads(1)

CLIENTS, CLIP, LR = 17, 0.5, 0.02
SIZES = (8, 16)  # cohort sizes of two rounds; a grid for 7 or 15 clients would be twice as fine
PATHS: dict[str, dict[str, Any]] = {
    "plain": {},
    "masked": {"secure_aggregation.enabled": True},
    "masked, 64 bits": {"secure_aggregation.enabled": True, "secure_aggregation.bits": 64},
}
CASES: dict[str, dict[str, Any]] = {
    **{name: {"method.name": name} for name in METHODS if runs.supported(name, "client")},
    "fra_lora, sketched": {"method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 4},
    "adaptive clipping": {"method.name": "fedlora", "privacy.clip_quantile": 0.5},
    "more phantoms than clients": {
        **{"method.name": "fedlora", "privacy.clip_quantile": 0.5},
        "evaluation.phantoms": 20,
    },
    "clients vanish": {"method.name": "fedlora", "federation.vanishing": 0.1, "secure_aggregation.dropout": 0.2},
}
# One method of each way to send products: factors, sketches, iterations. `methods/test_sensitivity.py` covers clipping.
WAYS = ("fra_lora", "fra_lora, sketched", "fedpower")
QUICK = [("masked", case) for case in WAYS if case != "fedpower"]
# One method of every class, and the settings; for WAYS also 64-bit words and no masks.
AT_NIGHT = [
    *(("masked", case) for case in CASES if case in runs.OF_A_CLASS or case not in METHODS),
    *itertools.product(PATHS, WAYS),
]
FIXED = {"federation.sampling": "fixed", "federation.cohort": 8, "federation.vanishing": 0.2}


@dataclass
class Summed:
    """One round's sums before noise by pass, and each client's contribution to them as bytes."""

    totals: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    sent: dict[tuple[str, int], bytes] = field(default_factory=dict)
    means: dict[str, Tensors] = field(default_factory=dict)


def build(case: str, path: str, **more: Any) -> Federation:
    usual = {"privacy.clip_norm": CLIP, "federation.cohort": 4, "training.steps": 1, "evaluation.phantoms": 0}
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
        for client in [*built.assembly.clients, *built.assembly.phantoms]:
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
    phantoms = [one.index for one in whole.assembly.phantoms]
    for cohort in (range(CLIENTS)[: SIZES[0]], range(CLIENTS)[-SIZES[1] :]):
        gone, everybody = cohort[len(cohort) // 3], [*cohort, *phantoms]
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
    [
        ("adaptive clipping", "plain"),
        ("clients vanish", "masked"),
        ("more phantoms than clients", "plain"),
        ("more phantoms than clients", "masked"),
    ],
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


@pytest.mark.parametrize(("clients", "at_least"), [(256, 1.008), (1024, 1.15), (4096, 4.19)])
def test_a_grid_that_follows_the_realised_number_breaks_the_bound(clients: int, at_least: float) -> None:
    """With 300,000 coordinates and 32-bit words. A grid fixed for all 5,000 clients keeps the bound."""
    assert moved(lambda taking_part: PublicPlan(300_000, 32, taking_part, 1.0, 1.0), clients) >= at_least
    assert moved(lambda taking_part: PublicPlan(300_000, 32, 5_000, 1.0, 1.0), clients) <= 1
