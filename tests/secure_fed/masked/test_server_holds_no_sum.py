"""With distributed noise no object on the server's side ever holds a sum without noise, or a single client's contribution.

After every message and every stage, a walk over everything reachable from the server, its sums and the protocol's server
compares each array, tensor and byte string with the secret vectors. With central noise, where the server may know the sum, the
same walk finds it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from privacy import distributed
from protocols import client as protocol_client
from protocols import server as protocol
from tests.cells import chosen
from tests.protocols.looking import everything
from tests.secure_fed.masked.wide_toys import (
    CLIPPED,
    DISTRIBUTED,
    HIDDEN,
    MASKED,
    SKETCH,
    federation,
    listen,
    one_round,
)


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
        [{}, {"secure_aggregation.active": True}, {"secure_aggregation.bits": 64}, {**HIDDEN, "federation.cohort": 4}],
        [{}],
    ),
    ids=["passive", "active", "64 bits", "hidden"],
)
def test_no_sum_without_noise_is_ever_there(watched: Any, extra: dict[str, Any]) -> None:
    watch = watched({**DISTRIBUTED, **NOISY, **extra})
    assert "sum change" in watch.wanted or "privacy.hidden_cohort" in extra
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
