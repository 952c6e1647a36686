"""All clients of a masked sum answer a lying server with the same refusal, before any client trains or tosses its coin.

A server that asks one client for something else than the others, to read its change from the sum, gets no sum.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from privacy import distributed
from privacy.participation import PublicOrder
from protocols.errors import ParameterError, ProtocolError, Tampering
from protocols.keys import registry_digest
from protocols.parameters import Parameters
from secure_fed.config import RunConfig
from secure_fed.rounds.masked import checks as asked
from secure_fed.rounds.masked import client
from secure_fed.rounds.masked.checks import ExpectedRounds, require_terms
from secure_fed.rounds.masked.terms import Registry, Terms
from secure_fed.rounds.protection import Protection
from secure_fed.rounds.request_checks import Acceptable
from secure_fed.rounds.transport import Request, Stage
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.lying import Heard, Watched, request_of, session, watch
from tests.secure_fed.masked.wide_toys import DISTRIBUTED, HIDDEN, MASKED, Tampered, federation, let_train, listen

TWELVE = [3] * 12
ACTIVE = {"secure_aggregation.active": True, "secure_aggregation.dropout": 0.125}
KINDS = {
    "hidden": {**HIDDEN, **ACTIVE},
    "hidden, chosen": {**HIDDEN, **ACTIVE, "secure_aggregation.neighbours": 8, "secure_aggregation.corrupt": 0.0},
    "masks": {**MASKED, **ACTIVE},
}
LANDS = {0, 2, 5}


def build(kind: str) -> tuple[Any, Watched]:
    """A federation of twelve clients and its watch. With a hidden cohort, exactly the clients of `LANDS` would train."""
    built = federation(KINDS[kind], sizes=TWELVE)
    if built.assembly.protection.hidden:
        let_train(built, LANDS)
    return built, watch(built)


def refused_by_all(heard: Heard, seen: Watched, stage: str) -> bool:
    """Whether all clients refused with the same sentence at that stage, before any training or coin."""
    where = {place for place, _, _ in heard.refused.values()}
    unspoilt = not seen.trained and not seen.entropy.drawn("coin")
    return len(heard.refused) == len(TWELVE) and heard.alike and where == {stage} and unspoilt


def test_an_honest_session_is_answered_and_tosses_once() -> None:
    """Shows that the refusals in this file's other tests are due to the lies and to nothing else."""
    built, seen = build("hidden")
    assert not session(built, request_of(built)).refused
    assert {client for _, client in seen.trained} == LANDS
    assert seen.entropy.drawn("coin") == 12


# Terms with another number of neighbours than the run's.


def ring_terms() -> tuple[Terms, int]:
    """Terms for 170 clients that choose their neighbours, a quarter of whom may collude; and 170."""
    chosen = {"enabled": True, "active": True, "corrupt": 0.25, "dropout": 0.05}
    settings = RunConfig().replace({("secure_aggregation", name): value for name, value in chosen.items()})
    return Terms(settings.secure_aggregation, Protection(), 170, 170, registry=Registry(170)), 170


def test_a_server_that_names_more_neighbours_to_read_a_vector_is_refused_at_the_first_step() -> None:
    """With all clients as neighbours and the lowest threshold that passes the other checks, two lists of survivors would both
    find enough answers, which together reveal both secrets of a client."""
    terms, clients = ring_terms()
    policy = terms.policy(clients)
    own = terms.parameters(0, range(clients), bytes(32), 5, 0)
    assert not own.complete
    require_terms(own, terms, 0)
    policy.check(own)
    threshold = max((clients - 1 + policy.corrupt) // 2 + 1, policy.threshold)
    lied = replace(own, neighbours=clients - 1, threshold=threshold, partners=0)
    colluding = clients // 4
    assert 2 * threshold <= lied.holders + colluding, "the attack would succeed"
    with refused(Tampering):
        require_terms(lied, terms, 0)
    with refused(ParameterError):
        policy.check(lied)
    replace(policy, neighbours=clients - 1).check(lied)  # no other check refuses it
    with refused(ParameterError):
        replace(policy, neighbours=None).check(lied)


def test_terms_that_were_accepted_once_are_judged_again_in_every_other_session() -> None:
    """Clients of one process share a parameters object, and only this very object is accepted without a second check."""
    terms, clients = ring_terms()
    nothing: Any = None
    rounds = ExpectedRounds(nothing, nothing, terms, ())
    own = terms.parameters(0, range(clients), bytes(32), 5, 0)

    def judge(parameters: Parameters, round_: int = 0) -> None:
        rounds.require_terms(Stage(round_, "advertise", parameters, b""))

    judge(own)
    judge(own)
    for _ in range(2):
        with refused(Tampering):
            judge(replace(own, survivors=own.survivors - 1))
    order = PublicOrder(2 * clients, clients)
    rounds.terms = replace(terms, registry=Registry(2 * clients), order=order)
    own = rounds.terms.parameters(0, order.of_round(0), bytes(32), 5, 0)
    judge(own)
    with refused(Tampering):
        judge(own, 1)


# Parameters.

AT_ADVERTISE: dict[str, dict[str, Callable[[Parameters], Any]]] = {
    "run": {"run": lambda p: "another"},
    "bits": {"bits": lambda p: 64},
    "more neighbours": {
        **{"neighbours": lambda p: p.neighbours + 3, "threshold": lambda p: max(p.threshold, 7)},
        "partners": lambda p: 0,
    },
    "fewer neighbours": {"neighbours": lambda p: 4, "threshold": lambda p: 4, "partners": lambda p: 1},
    "threshold": {"threshold": lambda p: p.threshold - 1 if 2 * (p.threshold - 1) > p.holders else p.threshold + 1},
    "fewer survivors": {"survivors": lambda p: p.survivors - 1},
    "more survivors": {"survivors": lambda p: 12},
    "passive": {"active": lambda p: False, "registry": lambda p: bytes(32), "partners": lambda p: 0},
    "registry": {"registry": lambda p: registry_digest(Registry(12).public, p.clients)},
}
AT_MASK: dict[str, dict[str, Callable[[Parameters], Any]]] = {
    "bound": {"bound": lambda p: p.bound + 1},
    "narrow bound": {"bound": lambda p: 1},
    "longer": {"length": lambda p: p.length + 1},
    "shorter": {"length": lambda p: p.length - 1},
    "layout": {"layout": lambda p: bytes(32)},
}
WHERE: dict[str, Callable[[str], bool]] = {
    "throughout": lambda stage: True,
    "before the vectors": lambda stage: stage in ("advertise", "share"),
    "with the vectors": lambda stage: stage == "mask",
}


def lying(changes: dict[str, Callable[[Parameters], Any]]) -> Callable[[Parameters], Parameters]:
    return lambda honest: replace(honest, **{name: change(honest) for name, change in changes.items()})


@pytest.mark.parametrize("kind", chosen(KINDS, ["hidden, chosen"]))
def test_a_session_on_other_terms_is_refused_before_a_key_is_sent_and_words_of_another_kind_before_anybody_trains(
    kind: str,
) -> None:
    """The bound matters most: a client that accepted a lower bound would reveal something about its vector by an error."""
    built, seen = build(kind)
    request = request_of(built)
    for what, changes in AT_ADVERTISE.items():
        heard = session(built, request, lie=lying(changes))
        assert refused_by_all(heard, seen, "advertise"), (what, heard.refused)
    for what, where in [
        *((what, "throughout") for what in AT_MASK),
        ("bound", "before the vectors"),
        ("bound", "with the vectors"),
    ]:
        heard = session(built, request, lie=lying(AT_MASK[what]), lies_at=WHERE[where])
        assert refused_by_all(heard, seen, "mask"), (what, where, heard.refused)
    assert not session(built, request).refused, "the refusals were due to the lies and to nothing else"


# Requests.


def other_tensors(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Request], Request]:
    """The request with its first tensor changed."""

    def changed(request: Request) -> Request:
        first = next(iter(request.tensors))
        return replace(request, tensors=request.tensors | {first: change(request.tensors.tensor(first))})

    return changed


def other_plan(**changes: Any) -> Callable[[Request], Request]:
    return lambda request: replace(request, plan=replace(request.plan, **changes))


# `test_acceptable.py` has rates, clip norms and numbers.
REQUESTS: dict[str, Callable[[Request], Request]] = {
    "a pass before": other_plan(passes=("x", "change")),
    "no pass": other_plan(passes=()),
    "nothing trains": other_plan(trainable=()),
    "another pass": lambda r: replace(r, pass_name="x"),
    "another pass and plan": lambda r: replace(r, pass_name="x", plan=replace(r.plan, passes=("x",))),
    "another layout": lambda r: replace(r, layout="00" * 32),
    "no tensors": lambda r: replace(r, tensors=Tensors()),
    "another shape": other_tensors(lambda tensor: tensor[:-1]),
    "another type": other_tensors(lambda tensor: tensor.double()),
    "no rate": lambda r: replace(r, lr=math.nan),
}


@pytest.mark.parametrize("kind", chosen(["hidden", "masks"], ["hidden"]))
def test_a_request_that_the_configuration_does_not_call_for_is_refused_by_all_alike(kind: str) -> None:
    built, seen = build(kind)
    for what, lie in REQUESTS.items():
        heard = session(built, lie(request_of(built)))
        assert refused_by_all(heard, seen, "mask"), (what, heard.refused)
        assert {error for _, error, _ in heard.refused.values()} == {Tampering}, what
    assert not session(built, request_of(built)).refused


def test_without_the_comparison_exactly_those_who_train_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "require_expected", lambda *given: None)
    built, _ = build("hidden")
    assert set(session(built, REQUESTS["another layout"](request_of(built))).refused) == LANDS


@pytest.mark.parametrize("clip_norm", chosen([0.2, 10.0, 1e9], [10.0]))
def test_no_clip_norm_lengthens_what_is_under_the_clients_noise(
    clip_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All refuse. Even without that, the sum is that of contributions clipped to the run's norm of 0.1 (here without noise)."""
    asked = federation({**DISTRIBUTED, **ACTIVE, "training.steps": 5})
    assert len(session(asked, replace(request_of(asked), clip_norm=clip_norm)).refused) == len(wide_toys.SIZES)
    monkeypatch.setattr(Acceptable, "fault", lambda self, request: "")
    monkeypatch.setattr(distributed, "discrete_gaussian", lambda sigma, count, stream: np.zeros(count, np.int64))
    built = federation({**DISTRIBUTED, **ACTIVE, "training.steps": 5})
    heard = wide_toys.listen(built)
    result = session(built, replace(request_of(built), clip_norm=clip_norm))
    assert not result.refused
    sent = heard.values(0, "change")
    assert all(0.09 < np.linalg.norm(values) <= 0.1 * (1 + 1e-6) for values in sent.values())
    encoding = built.assembly.masks.sums.terms.encoding(len(sent[0]), clip_norm)  # type: ignore[union-attr]
    told = encoding.decode(result.machine.total()).values
    np.testing.assert_allclose(told, sum(sent.values()), atol=1e-4 * clip_norm)


def test_a_stage_of_no_session_is_refused() -> None:
    built, seen = build("masks")
    request = request_of(built)
    assert not session(built, request, upto="share").refused
    terms = built.assembly.masks.sums.terms
    encoding = terms.encoding(built.assembly.server.layout(built.assembly.initial, request.pass_name).size, math.inf)
    parameters = terms.parameters(7, range(12), bytes.fromhex(request.digest), encoding.length, encoding.largest)
    with refused(Tampering):
        built.assembly.masks.clients[0].handle(Stage(0, "mask", parameters, b"", request))
    assert not seen.trained


SHRINKING = {**MASKED, "method.name": "fedara", "method.rank": 4, "method.warmup_rounds": 1, "method.final_rounds": 1}


@pytest.mark.parametrize("masks", ["votes", "global"])
def test_shapes_that_the_run_cannot_have_come_to_are_refused_before_anybody_trains(masks: str) -> None:
    """Ranks that are gone after the last round. `methods/test_fedara.py` has the shapes that each round admits."""
    built = federation({**SHRINKING, "method.masks": masks, "federation.rounds": 5})
    seen = watch(built)
    heard = session(built, request_of(built, 4))
    assert {(place, error) for place, error, _ in heard.refused.values()} == {("mask", Tampering)}
    assert len(heard.refused) == len(wide_toys.SIZES)
    assert not seen.trained
    assert not session(built, request_of(built, 0), number=1).refused


# All clients but one kept from learning anything, to read that client's change from the sum.

VICTIM = 2
STAYING = {**MASKED, "secure_aggregation.active": True, "secure_aggregation.dropout": 0.0}
Lie = Callable[[Request], Request]


def _zeros(tensors: Tensors) -> Tensors:
    return Tensors((name, torch.zeros_like(tensors.tensor(name))) for name in tensors)


LIES: dict[str, tuple[str, Lie]] = {
    "no step": ("fedlora", lambda request: replace(request, lr=0.0)),
    "a smaller step": ("ffa_lora", lambda request: replace(request, lr=request.lr / 1e6)),
    "nothing to start from": ("fra_lora", lambda request: replace(request, tensors=_zeros(request.tensors))),
    "nothing to project on": (
        "fra_lora sketch",
        lambda request: replace(request, means={name: _zeros(mean) for name, mean in request.means.items()}),
    ),
}


def run(way: str, lie: Callable[[int, Stage], Stage]) -> Any:
    sketch = {"method.transport_form": "sketch"} if "sketch" in way else {}
    built = federation({**STAYING, "method.name": way.split()[0], **sketch, "federation.rounds": 1})
    heard = listen(built)
    built.assembly = replace(built.assembly, transport=Tampered(built.assembly.transport, lie))
    built.run()
    return heard


def told(lie: Lie, *, parameters: bool) -> Callable[[int, Stage], Stage]:
    """A transport's lie to all clients but the victim; with `parameters` the session's digest matches the lie."""

    def lied(client: int, stage: Stage) -> Stage:
        if client == VICTIM:
            return stage
        request = None if stage.request is None else lie(stage.request)
        own = stage.parameters
        if parameters:  # stages before the request get an invented digest
            own = replace(own, layout=bytes.fromhex(request.digest) if request else bytes(range(32)))
        return replace(stage, request=request, parameters=own)

    return lied


@pytest.mark.parametrize(
    ("name", "fitting"),
    chosen(
        itertools.product(LIES, (False, True)),
        [
            ("no step", True),
            ("a smaller step", False),
            ("nothing to start from", False),
            ("nothing to project on", True),
        ],
    ),
)
def test_who_is_asked_for_something_else_refuses(name: str, fitting: bool) -> None:
    way, lie = LIES[name]
    with pytest.raises(ProtocolError):
        run(way, told(lie, parameters=fitting))


def test_the_sum_would_be_one_clients_change_without_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason for the comparison: all clients train and are in the sum, and only the victim's tensors change."""
    monkeypatch.setattr(asked, "_same_for_all", lambda request, stage: True)
    monkeypatch.setattr(Acceptable, "fault", lambda *given: "")
    heard = run("fedlora", told(LIES["no step"][1], parameters=False))
    moved = {client: reply.contribution.norm() for client, reply in heard.replies[0, "change"].items()}
    assert len(moved) == 4
    assert [client for client, norm in moved.items() if norm > 0] == [VICTIM]


def test_the_digest_is_of_all_that_is_asked() -> None:
    built = federation(STAYING)
    state = built.assembly.initial
    request = built.assembly.server.request(state, built.assembly.server.plan(state), "change", 0.1, {})
    first = next(iter(request.tensors))
    others = [
        replace(request, round=1),
        replace(request, pass_name="x"),
        replace(request, lr=0.1 + 1e-12),
        replace(request, clip_norm=1.0),
        replace(request, layout="00" * 32),
        replace(request, tensors=request.tensors.without([first])),
        replace(request, tensors=request.tensors | {first: request.tensors.tensor(first) + 1e-3}),
        replace(request, tensors=request.tensors | {first: request.tensors.tensor(first)[None]}),
        replace(request, means={"x": request.tensors}),
        replace(request, first="00" * 32),
        replace(request, plan=replace(request.plan, trainable=())),
        replace(request, plan=replace(request.plan, down=())),
    ]
    digests = {request.digest, *(other.digest for other in others)}
    assert len(digests) == len(others) + 1
    assert replace(request).digest == request.digest
