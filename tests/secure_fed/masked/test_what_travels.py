"""Messages of the protocol, and the model in requests, are all that passes; with a hidden cohort they tell nobody who trained.

Every client takes part in every round of a hidden cohort, and only the client itself knows whether it trained.

With distributed noise no object on the server's side ever holds a sum without noise, or a single client's contribution. After
every message and every stage, a walk over everything reachable from the server, its sums and the protocol's server compares
each array, tensor and byte string with the secret vectors. With central noise, where the server may know the sum, the same
walk finds it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import binomtest, chi2

from privacy import distributed
from privacy.entropy import SeededEntropy, SystemEntropy
from privacy.participation import Poisson
from protocols import client as protocol_client
from protocols import server as protocol
from protocols import wire
from protocols.wire import Masked
from secure_fed.errors import ConfigError
from secure_fed.rounds.masked.encoding_plan import Contribution
from secure_fed.rounds.transport import Recording, Staged
from tests.cells import chosen
from tests.golden import refused
from tests.protocols.looking import everything
from tests.secure_fed import private_toys
from tests.secure_fed.masked import wide_toys
from tests.secure_fed.masked.wide_toys import (
    CHANCE,
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    MASKED,
    PAIRS,
    PRIVACY,
    SIZES,
    SKETCH,
    WAYS,
    federation,
    let_train,
    listen,
    one_round,
    recorder,
)

EIGHT = [4] * 8


def test_every_client_tosses_a_coin_of_its_own_in_every_round() -> None:
    built = federation({**HIDDEN, "federation.rounds": 12}, sizes=EIGHT)
    assert all(type(member._entropy) is SystemEntropy for member in built.assembly.masks.clients)  # type: ignore[union-attr]
    heard = listen(built)
    recording = recorder(built)
    result = built.run()
    trained = np.zeros((12, 8), bool)
    for (round_, _), replies in heard.replies.items():
        trained[round_, list(replies)] = True
    assert binomtest(int(trained.sum()), trained.size, 3 / 8).pvalue > CHANCE
    for wrong in (0.1, 0.75):  # wrong rates, which data of the true rate fit once in a billion times
        assert binomtest(int(trained.sum()), trained.size, wrong).pvalue < 1e-2
    assert len({row.tobytes() for row in trained}) > 6, "cohorts differ from round to round"
    assert len({column.tobytes() for column in trained.T}) > 4, "and clients from each other"
    asked = {(ask.round, ask.name, reply.client) for ask, reply in recording.exchanges}
    assert asked == {(r, n, c) for r in range(12) for n in ("advertise", "share", "mask", "unmask") for c in range(8)}
    assert {record["cohort"] for record in result.records} == {8}


def test_two_passes_over_one_hidden_coin_are_refused() -> None:
    for settings in (SKETCH, {**SKETCH, "method.name": "fra_then_ffa"}):
        with refused(ConfigError, "privacy.hidden_cohort"):
            federation({**HIDDEN, **settings}, sizes=EIGHT)


def _told(built: Any, trained: set[int]) -> tuple[Any, Any]:
    """A round in which exactly these clients train: its record, and the sizes and types of all messages."""
    let_train(built, trained)
    recording = Recording(built.assembly.transport)
    heard = listen(built)
    seen = one_round(built, transport=recording)
    assert {client for replies in heard.replies.values() for client in replies} == trained
    passed = [
        (ask.round, ask.name, len(ask.message), type(ask.request), reply.client, type(reply), len(reply.message))
        for ask, reply in recording.exchanges
    ]
    return wide_toys.without_time([seen.record]), passed


def test_neither_records_nor_what_passes_tell_who_trained() -> None:
    told = [
        _told(federation({**HIDDEN, **WAYS["fra_lora"]}, sizes=EIGHT), trained)
        for trained in ({0, 1, 2}, set(), set(range(8)))
    ]
    assert all(one == told[0] for one in told)


def test_the_mean_is_over_the_expected_number_whoever_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "discrete_gaussian", lambda sigma, count, stream: np.zeros(count, np.int64))
    for trained in ({0}, {0, 1, 2, 3, 4}):
        built = federation(HIDDEN, sizes=EIGHT)
        let_train(built, trained)
        heard = listen(built)
        seen = one_round(built)
        total = sum(heard.values(0, "change").values())
        np.testing.assert_allclose(seen.means["change"], total / 3, atol=1e-5)


def test_who_vanishes_is_not_who_did_not_train() -> None:
    """The number of survivors, and so whether a round aborts, does not depend on the coins."""
    for trained in ((), range(8)):
        built = federation({**HIDDEN, "secure_aggregation.dropout": 0.25}, sizes=EIGHT)
        let_train(built, trained)
        lost = wide_toys.Losing(built.assembly.transport, {0: "mask", 5: "share"})
        assert one_round(built, transport=lost).record["masked"]["survivors"] == 6


def test_what_everybody_sends_is_told_before_the_start_and_holds() -> None:
    settings = {**HIDDEN, "federation.rounds": 2, "evaluation.dummies": 0}
    built = federation(settings, sizes=EIGHT)
    (told,) = built.notes
    result = built.run()
    (record, other), said = result.records, result.summary
    assert said["epsilon"] == said["epsilon_participants"]
    assert "every client takes part in every round" in said["privacy"]["sampling"]
    assert (said["cohort"], said["secure_aggregation"]["clients"]) == (3, 8)
    each, back = (record[name] / 8 / 1e6 for name in ("bytes_up", "bytes_down"))
    whole = 2 * (record["bytes_up"] + record["bytes_down"]) / 1e6
    assert other["bytes_up"] == record["bytes_up"]
    assert f"each of the 8 clients sends {each:.3g} MB and receives {back:.3g} MB in every round" in told
    assert f"which makes {whole:.3g} MB for all clients over the whole run" in told
    assert federation({**settings, "privacy.hidden_cohort": False}, sizes=EIGHT).notes == []


# All that passes.


def recorded(settings: dict[str, Any], **own: Any) -> tuple[Any, Any, list[tuple[Any, Any]], Any]:
    built = federation({**MASKED, **settings}, **own)
    heard = listen(built)
    recording = recorder(built)
    result = built.run()
    return built, result, recording.exchanges, heard


ACTIVE = {"secure_aggregation.active": True}
CHOSEN = {**ACTIVE, "secure_aggregation.neighbours": 8, "secure_aggregation.corrupt": 0.0}
KINDS: dict[str, dict[str, Any]] = {"passive": {}, "active": ACTIVE, "chosen": CHOSEN}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "way", "privacy"),
    chosen(
        [
            (kind, *pair)
            for kind in KINDS
            for pair in PAIRS
            if kind == "passive" or pair[0] in ("fedlora", "fra_lora sketch")
        ],
        [
            ("passive", "fedlora", "hidden"),
            ("chosen", "fra_lora sketch", "central"),
            ("passive", "fra_then_ffa sketch", "local"),
        ],
    ),
)
def test_nothing_but_messages_of_the_protocol_comes_up(kind: str, way: str, privacy: str) -> None:
    """Every method works under every privacy. A reported loss would be of private examples."""
    many = 4 if kind == "passive" and privacy != "hidden" else 12
    cohort = many if privacy != "hidden" else 11  # nobody trains once in ten million million times
    usual = {"federation.rounds": 2 if "then" in way else 1, "federation.cohort": cohort}
    settings = {**KINDS[kind], **WAYS[way], **PRIVACY[privacy], **usual}
    _, result, exchanges, heard = recorded(settings, sizes=[4] * many)
    assert result.state.tensors.is_finite()
    assert {record["train_loss"] is None for record in result.records} == {privacy != "nothing"}
    assert {type(reply) for _, reply in exchanges} == {Staged}
    assert {name for _, reply in exchanges for name in vars(reply)} == {"client", "message"}
    stages = ["advertise", "share", "mask", *(["consistency"] if kind != "passive" else []), "unmask"]
    assert [ask.name for ask, reply in exchanges if reply.client == 0] == stages * len(heard.replies)
    assert all(isinstance(reply.message, (bytes, bytearray)) for _, reply in exchanges)
    for ask, reply in exchanges:
        if kind != "chosen" or ask.name != "unmask":  # the number of shares held depends on the clients' choices
            size = wire.traffic(ask.parameters)[ask.name].up
            assert len(reply.message) == size, "the size of a message tells nothing"
    contributed = [reply.contribution for replies in heard.replies.values() for reply in replies.values()]
    texts = [
        array.tobytes()
        for one in contributed
        for member in one.dense().parts().values()
        for array in [member.detach().numpy().ravel()[:4], member.detach().double().numpy().ravel()[:4]]
        if np.abs(array).max(initial=0) > 0
    ]
    passed = b"".join(bytes(reply.message) for _, reply in exchanges)
    assert texts
    assert not [text for text in texts if text in passed]


def test_what_a_client_masks_looks_uniform_and_is_another_every_time() -> None:
    """By a chi-square test of the bytes, which unmasked words fail."""
    built, _, exchanges, _ = recorded({"federation.rounds": 3})
    masks = [(ask, reply) for ask, reply in exchanges if ask.name == "mask"]
    vectors = [Masked.from_bytes(reply.message, ask.parameters, reply.client).vector.copy() for ask, reply in masks]

    def odd(words: np.ndarray) -> float:
        counts = np.bincount(words.view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        return float(((counts - expected) ** 2 / expected).sum())

    limit = chi2.isf(CHANCE, 255)
    assert len(vectors) == 12
    assert odd(np.concatenate(vectors)) < limit
    assert len({vector.tobytes() for vector in vectors}) == 12
    layout = built.assembly.server.layout(built.assembly.initial, "change")
    sizes = {(len(vector), len(reply.message)) for vector, (_, reply) in zip(vectors, masks, strict=True)}
    assert sizes == {(layout.size + 4, 48 + 4 * (layout.size + 4))}, (
        "weight, loss, and counts of losses and contributions"
    )
    encoding = built.assembly.masks.sums.terms.encoding(layout.size, math.inf)
    bare = encoding.encode(Contribution(np.random.default_rng(0).normal(size=layout.size) / 50, 1.0, 1.0), None)
    assert odd(np.concatenate([bare] * 4)) > limit


@pytest.mark.parametrize(
    ("way", "active"), chosen([("fedlora", False), ("fra_lora sketch", True)], [("fra_lora sketch", True)])
)
def test_bytes_are_those_that_passed(way: str, active: bool) -> None:
    _, result, exchanges, _ = recorded({**WAYS[way], "secure_aggregation.active": active})
    up, down = [0] * 3, [0] * 3
    for ask, reply in exchanges:
        up[ask.round] += len(reply.message)
        down[ask.round] += len(ask.message) if ask.name != "advertise" else len(ask.parameters.to_bytes())
        assert (ask.request is not None) == (ask.name == "mask")
        if ask.request is not None:
            sent = [tensors for tensors in (ask.request.tensors, *ask.request.means.values()) if tensors]
            down[ask.round] += sum(len(tensors.to_bytes()) for tensors in sent)
    passed = list(zip(up, down, strict=True))
    assert [(record["bytes_up"], record["bytes_down"]) for record in result.records] == passed
    assert [(one["masked"]["bytes_up"], one["masked"]["bytes_down"]) for one in result.records] == passed
    said = result.whole["secure_aggregation"]
    assert (said["bytes_up"], said["bytes_down"]) == (sum(up), sum(down))
    assert (result.summary["bytes_up"], result.summary["bytes_down"]) == (sum(up), sum(down))
    assert said["survivors"] == said["clients"] == len(SIZES)
    assert said["active"] is active
    for name in ("client_seconds", "server_seconds"):
        assert said[name] == pytest.approx(sum(record["masked"][name] for record in result.records))
        assert said[name] > 0


@pytest.mark.parametrize("adapts", chosen([False, True], [True]))
@pytest.mark.parametrize("active", chosen([False, True], [True]))
@pytest.mark.parametrize("way", chosen(WAYS, ["fra_lora sketch"]))
def test_expected_bytes_are_those_in_closed_form(way: str, active: bool, adapts: bool) -> None:
    """With a secret cohort, records hold the bytes of a cohort of the expected size; here every client is in the cohort."""
    settings = {**WAYS[way], **PRIVACY["central"], "secure_aggregation.active": active}
    built, result, exchanges, _ = recorded({**settings, **({"privacy.clip_quantile": 0.5} if adapts else {})})
    assert built.assembly.protection.hides_cohort
    for round_, record in enumerate(result.records):
        passed = [(ask, reply) for ask, reply in exchanges if ask.round == round_]
        assert record["bytes_up"] == sum(len(reply.message) for _, reply in passed)
        assert record["bytes_down"] == sum(ask.bytes_down for ask, _ in passed)


def test_no_model_goes_to_a_client_that_makes_up_the_number() -> None:
    built = federation({**MASKED, **PRIVACY["central"], "federation.cohort": 4}, sizes=[4] * 9, seed=1)
    recording = recorder(built)
    built.assembly = replace(
        built.assembly, server=replace(built.assembly.server, sampler=private_toys.Nobody(9, 4 / 9))
    )
    heard = listen(built)
    result = built.run()
    assert heard.replies == {}
    assert len(recording.exchanges) == 3 * 4 * 9, "a public number, whoever was drawn"
    assert all(ask.request is None for ask, _ in recording.exchanges)
    assert [record["cohort"] for record in result.records] == [4, 4, 4]


def test_records_do_not_tell_how_many_took_part() -> None:
    sampler, told, drawn = Poisson(8, 0.5), [], []
    for size in (0, 6):
        seed = next(s for s in range(500) if len(sampler.draw(SeededEntropy(s).stream("cohort", 0).uniform)) == size)
        _, result, exchanges, _ = recorded(
            {**PRIVACY["central"], "federation.cohort": 4, "federation.rounds": 1}, sizes=[4] * 8, seed=seed
        )
        drawn.append(sum(ask.request is not None for ask, _ in exchanges))
        record = {k: v for k, v in result.records[0].items() if k not in ("accuracy", "macro_f1", "loss", "seconds")}
        times = {"client_seconds", "server_seconds"}  # durations reveal the cohort's size and are not published
        told.append(record | {"masked": {k: v for k, v in record["masked"].items() if k not in times}})
    assert drawn == [0, 6]
    assert told[0] == told[1]


# What the server holds.


def numbers(one: Any) -> Iterator[np.ndarray]:
    """The object's content as float64 vectors, under every plausible interpretation of its bytes."""
    if isinstance(one, torch.Tensor):
        yield one.detach().double().numpy().ravel()
    elif isinstance(one, np.ndarray) and one.dtype.kind in "fiu":
        yield one.astype(np.float64).ravel()
        if one.dtype.kind == "u":
            yield one.view(f"i{one.itemsize}").astype(np.float64).ravel()
    elif isinstance(one, (bytes, bytearray, memoryview)):
        data = bytes(one)
        for start in {0, 48} if len(data) > 48 else {0}:
            rest = data[start:]
            for kind in ("<i4", "<i8", "<f4", "<f8"):
                usable = len(rest) - len(rest) % np.dtype(kind).itemsize
                with np.errstate(all="ignore"):
                    yield np.frombuffer(rest[:usable], kind).astype(np.float64)


def alike(found: np.ndarray, wanted: np.ndarray) -> bool:
    """Whether `found` begins with a multiple of `wanted`: the absolute cosine is above 0.999."""
    if len(found) < len(wanted) or not np.isfinite(found).all():
        return False
    part = found[: len(wanted)]
    part = part / max(np.abs(part).max(), 1e-300)
    norms = np.linalg.norm(part) * np.linalg.norm(wanted)
    return bool(norms > 0 and abs(part @ wanted) > 0.999 * norms)


@dataclass
class Watch:
    """Walks everything on the server's side, and records the names of `wanted` vectors that it finds."""

    roots: list[Any]
    wanted: dict[str, np.ndarray] = field(default_factory=dict)
    found: set[str] = field(default_factory=set)
    walks: int = 0

    def walk(self, *more: Any) -> None:
        self.walks += 1
        vectors = [vector for one in everything([*self.roots, *more]) for vector in numbers(one)]
        for name, wanted in self.wanted.items():
            if name not in self.found and any(alike(vector, wanted) for vector in vectors):
                self.found.add(name)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(settings, passes) -> the watch after one round."""

    def run(settings: dict[str, Any], passes: tuple[str, ...] = ("change",)) -> Watch:
        built = federation(settings)
        heard = listen(built)
        watch = Watch([built.assembly.masks.sums.terms])  # type: ignore[union-attr]
        machines: list[Any] = []
        receive, close, total = protocol.Server.receive, protocol.Server.close, protocol.Server.total

        def refresh() -> None:
            for name in passes:
                values = heard.values(0, name) if (0, name) in heard.replies else {}
                watch.wanted |= {f"client {client} {name}": value for client, value in values.items() if value.any()}
                if len(values) == 4:
                    watch.wanted[f"sum {name}"] = np.sum(list(values.values()), 0)

        def receiving(self: Any, sender: int, message: Any) -> None:
            receive(self, sender, message)
            machines[:] = [self]
            refresh()
            watch.walk(built.assembly.masks.sums.terms, self, message)  # type: ignore[union-attr]

        def closing(self: Any) -> Any:
            sent = close(self)
            watch.walk(self, sent)
            return sent

        def totalling(self: Any) -> Any:
            summed = total(self)
            watch.walk(self, summed)
            return summed

        monkeypatch.setattr(protocol.Server, "receive", receiving)
        monkeypatch.setattr(protocol.Server, "close", closing)
        monkeypatch.setattr(protocol.Server, "total", totalling)
        release = type(built.assembly.server).release

        def releasing(self: Any, intake: Any, *rest: Any) -> Any:
            watch.walk(intake)
            released = release(self, intake, *rest)
            watch.walk(released, intake)
            return released

        monkeypatch.setattr(type(built.assembly.server), "release", releasing)
        seen = one_round(built)
        watch.walk(seen.after, seen.record, seen.means, machines)
        assert watch.walks > 20
        assert len(watch.wanted) >= len(passes) * 4
        return watch

    return run


NOISY = {"privacy.noise_multiplier": 5.0}  # so that a noised sum does not resemble the sum


@pytest.mark.parametrize(
    "extra",
    chosen(
        [
            {},
            SKETCH,
            {"secure_aggregation.active": True},
            {"secure_aggregation.bits": 64},
            {**HIDDEN, "federation.cohort": 4},
        ],
        [{}, SKETCH],
    ),
    ids=["passive", "sketch", "active", "64 bits", "hidden"],
)
def test_no_sum_without_noise_is_ever_there(watched: Any, extra: dict[str, Any]) -> None:
    """In either pass of a sketch, too."""
    passes = ("sketch", "change") if extra is SKETCH else ("change",)
    watch = watched({**DISTRIBUTED, **NOISY, **extra}, passes)
    assert {f"sum {name}" for name in passes} <= watch.wanted.keys() or "privacy.hidden_cohort" in extra
    assert watch.found == set()


def test_nor_in_either_pass_of_a_sketch(watched: Any) -> None:
    watch = watched({**DISTRIBUTED, **NOISY, **SKETCH}, ("sketch", "change"))
    assert {"sum sketch", "sum change"} <= watch.wanted.keys()
    assert watch.found == set()


@pytest.mark.parametrize("settings", [{**MASKED, **CLIPPED, **NOISY}, MASKED], ids=["central", "no privacy"])
def test_the_walk_finds_the_sum_where_the_server_has_it_and_still_no_single_contribution(
    watched: Any, settings: dict[str, Any]
) -> None:
    assert watched(settings).found == {"sum change"}


def test_the_walk_finds_contributions_that_are_not_masked(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol_client, "add_masks", lambda view, masks, threads=None: None)
    monkeypatch.setattr(protocol, "add_masks", lambda view, masks, threads=None: None)
    assert {f"client {client} change" for client in range(4)} <= watched(MASKED).found


def test_the_walk_finds_a_sum_whose_shares_of_noise_were_forgotten(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "discrete_gaussian", lambda sigma, count, stream: np.zeros(count, np.int64))
    assert "sum change" in watched({**DISTRIBUTED, **NOISY}).found
