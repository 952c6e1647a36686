"""Whole sessions: with any dropouts at any stage the result is the survivors' plain sum bit for bit, or no sum.

Random sessions are pure functions of their seeds, except for the Shamir shares, which do not affect the outcome. The expected
outcome is computed by counting clients, from the definitions and not by the code under test.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import protocols
import protocols.client
from protocols.client import Client
from protocols.errors import Aborted, MessageError, ProtocolError
from protocols.graph import ChosenGraph, Topology, complete, ring
from protocols.keys import Identity, Secret
from protocols.masking import add_masks
from protocols.parameters import stages
from protocols.roster import chosen_by
from protocols.server import Server, core, masks_left
from protocols.wire import Masked, Opened, Shares
from tests.protocols.looking import contents, everything, remains
from tests.protocols.sessions import METHODS, Cast, Play, cast, drawn, play, secret

CASTS = {
    "complete": {},
    "complete, active": {"active": True},
    "ring": {"count": 9, "neighbours": 4, "threshold": 3},
    "ring, active": {"count": 9, "neighbours": 4, "threshold": 3, "active": True},
    "64 bits": {"bits": 64, "bound": 2**40},
    "two clients": {"count": 2, "threshold": 1},
}


def equal(scene: Play) -> bool:
    return scene.server.total().tolist() == scene.expected().tolist()


@pytest.mark.parametrize("options", CASTS.values(), ids=CASTS)
def test_the_sum_is_the_plain_sum(options: Mapping[str, Any]) -> None:
    scene = play(cast(**options))
    assert scene.server.stage == "done"
    assert scene.server.survivors == scene.cast.ids
    assert (scene.errors, scene.server.suspects) == ({}, frozenset())
    assert equal(scene)


def test_the_example_of_the_package_runs() -> None:
    """The code in the docstring, with its clients and parameters filled in."""
    made = cast()
    code = (protocols.__doc__ or "").partition("process:\n\n")[2].partition("\n\nA client that")[0]
    names: dict[str, Any] = {**vars(protocols), "parameters": made.parameters, "policy": made.policy}
    names["vectors"] = made.vectors()
    exec("\n".join(line.removeprefix("    ") for line in code.splitlines()), names)
    assert names["total"].tolist() == sum(made.vectors().values()).tolist()  # type: ignore[union-attr]


def test_after_a_session_nobody_holds_secrets() -> None:
    scene = play(cast(active=True))
    for machine in (scene.server, *scene.clients.values()):
        assert not [thing for thing in everything(machine) if isinstance(thing, Secret)]


def test_both_secrets_of_a_client_are_dealt_at_the_threshold_of_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    dealt, split_each = [], protocols.client.split_each

    def noted(secrets: Sequence[Secret], threshold: int, holders: Sequence[int]) -> list[dict[int, bytes]]:
        dealt.append((len(secrets), threshold))
        return split_each(secrets, threshold, holders)

    monkeypatch.setattr(protocols.client, "split_each", noted)
    play(cast(count=6, threshold=4))
    assert dealt == [(2, 4)] * 6


def test_shares_hide_in_what_is_delivered_and_opened_ones_are_those_asked_for() -> None:
    made = cast(count=6, threshold=3)
    scene = play(made, silent={"mask": made.ids[:1]})
    for me in made.ids[1:]:
        opened = Opened.from_bytes(scene.said["unmask", me], made.parameters, me)
        assert set(opened.keys) == {made.ids[0]}
        assert set(opened.seeds) == set(made.ids[1:]) - {me}
        dealt = Shares.from_bytes(scene.said["share", me], made.parameters, me)
        assert set(dealt.sealed) == set(made.ids) - {me}


@dataclass(frozen=True)
class Crowd(Cast):
    """A cast whose clients have the ids in `numbers`."""

    numbers: tuple[int, ...] = ()

    @cached_property
    def ids(self) -> tuple[int, ...]:
        return self.numbers


def sized(rng: random.Random) -> tuple[int, int]:
    """The number of clients, seldom large since keys take time, and of neighbours: all others, or an even number."""
    if rng.random() < 0.45:
        count = 3 + int(14 * rng.random() ** 2) if rng.random() < 0.98 else rng.randint(17, 60)
        return count, count - 1
    count = 5 + int(56 * rng.random() ** 2)
    return count, 2 * rng.randint(1, min((count - 2) // 2, 5))


def crowd(rng: random.Random) -> Crowd:
    count, neighbours = sized(rng)
    active = rng.random() < 0.4
    least = neighbours // 2 + 1 if active else 1
    bits = rng.choice([32, 64])
    window = rng.choice([0, 0, rng.randint(0, neighbours // 2 - 1)]) if neighbours < count - 1 else 0
    made = Crowd(
        count=count,
        neighbours=neighbours,
        threshold=rng.randint(least, max(least, 3 * neighbours // 4)),
        survivors=rng.choice([2, rng.randint(2, count)]),
        active=active,
        bits=bits,
        length=rng.randint(128 // bits, 7),  # the search for secrets needs vectors of 16 bytes or more
        bound=rng.choice([0, 2 ** (bits - 8)]),
        window=window,
        partners=rng.randint(1, max(1, neighbours // 2)),
        run=f"schedule {rng.random()}",
        numbers=tuple(sorted(rng.sample(range(2**32 - 1), count))),
    )
    return replace(made, identities={me: Identity.from_secret(secret(rng)) for me in made.ids}) if active else made


def vanishing(made: Cast, rng: random.Random) -> dict[str, set[int]]:
    """The clients that drop out at each stage: each client independently, and in some sessions a random group at once."""
    share = rng.choice([0.0, 0.03, 0.1, 0.2, 0.5])
    when = {me: rng.choice(stages(made.parameters)) for me in made.ids if rng.random() < share}
    if rng.random() < 0.4:
        stage = rng.choice([*stages(made.parameters), "share"])
        when.update(dict.fromkeys(rng.sample(made.ids, 1 + int(made.count * rng.random() ** 2)), stage))
    return {stage: {me for me, at in when.items() if at == stage} for stage in stages(made.parameters)}


class Session:
    """The session of one seed. It keeps its clients' secrets, so that a test can search the server for them."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.cast = crowd(self.rng)
        self.silent = vanishing(self.cast, self.rng)
        self.server: Server = self.cast.server()
        rng = self.rng
        self.keys = {me: drawn(rng) for me in self.cast.ids}
        self.vectors = {me: self._vector() for me in self.cast.ids}
        self.masked: dict[int, NDArray[Any]] = {}
        self.opened: list[bytes] = []  # shares
        self.stage = ""
        self.error: Aborted | None = None

    def _vector(self) -> NDArray[Any]:
        bits, most = self.cast.bits, self.cast.bound or 2 ** (self.cast.bits - 1) - 1
        drawn = [self.rng.randint(-most, most) for _ in range(self.cast.length)]
        return np.array(drawn, dtype=f"i{bits // 8}").view(f"u{bits // 8}")

    def run(self) -> bool:
        """Play the session; returns whether it ends with a sum. Any error other than `Aborted` fails the test."""
        clients = {me: self.cast.client(me, _keys=self.keys[me]) for me in self.cast.ids}
        inbox, gone = dict.fromkeys(self.cast.ids, b""), set[int]()
        for stage in stages(self.cast.parameters):
            self.stage = stage
            gone |= self.silent[stage]
            for me in self.rng.sample(list(inbox), len(inbox)):
                if me in gone:
                    continue
                try:
                    answer = self._answer(clients[me], inbox[me])
                except Aborted:
                    gone.add(me)
                    continue
                self.server.receive(me, answer)
            try:
                inbox = self.server.close()
            except Aborted as error:
                self.error = error
                return False
        return True

    def _answer(self, client: Client, message: bytes) -> bytes:
        if self.stage == "advertise":
            return client.advertise()
        last = (self.vectors[client.me],) if self.stage == "mask" else ()
        answer = bytes(getattr(client, METHODS[self.stage])(message, *last))
        if self.stage == "mask":
            self.masked[client.me] = Masked.from_bytes(answer, self.cast.parameters, client.me).vector
        if self.stage == "unmask":
            opened = Opened.from_bytes(answer, self.cast.parameters, client.me)
            self.opened += [*opened.seeds.values(), *opened.keys.values()]
        return answer

    def secrets(self) -> Iterator[tuple[str, bytes]]:
        """(name, bytes) of all data that the server must not hold after the session.

        Vectors with all, some or none of their masks, running sums of these, the masks, private keys, seeds and opened shares.
        """
        total = np.zeros(self.cast.length, f"u{self.cast.bits // 8}")
        sums = {form: total.copy() for form in ("plain", "masked", "with pair masks", "with its own mask")}
        for me, masked in self.masked.items():
            mask = np.zeros_like(total)
            add_masks(mask, [(self.keys[me].seed, 1)])
            vector = self.vectors[me]
            forms = {"plain": vector, "with its own mask": vector + mask}
            forms |= {"with pair masks": masked - mask, "masked": masked}
            for form, words in {**forms, "own mask": mask, "pair masks": masked - mask - vector}.items():
                yield f"{form} vector of {me}", words.tobytes()
            for form, added in sums.items():
                added += forms[form]
                yield f"sum up to {me}, {form}", added.tobytes()
        for me, keys in self.keys.items():
            yield from ((f"vector of {me}", self.vectors[me].tobytes()), (f"seed of {me}", keys.seed.reveal()))
            yield from ((f"key of {me}", key.private.reveal()) for key in (keys.mask, keys.channel))
        yield from (("a share", share) for share in self.opened)


def foretold(session: Session) -> set[int] | None:
    """The survivors that the session must have, by counting on the server's graph; None if it must abort."""
    parameters, silent = session.cast.parameters, session.silent
    least = max(parameters.survivors, parameters.threshold + 1)
    left = set(parameters.clients) - silent["advertise"]
    if len(left) < least:
        return None
    graph = session.server._graph
    if parameters.chosen:
        chosen = {me: chosen_by(me, session.keys[me].choice.reveal(), parameters) for me in left}
        graph = ChosenGraph(chosen, parameters.masked)
    left = dealt = naive_core(graph, left - silent["share"], parameters.threshold, parameters.partners)
    survivors = dealt - silent["mask"]
    if min(len(dealt), len(survivors)) < least or short(graph, dealt, survivors, survivors, parameters.threshold):
        return None
    if not together(graph, survivors, session.cast.window, parameters.partners):
        return None
    left = set(survivors)
    if parameters.active:
        left -= silent["consistency"]
        if len(left) < (parameters.survivors if parameters.chosen else parameters.threshold + 1):
            return None
        if short(graph, dealt, survivors, left, parameters.threshold):
            return None
    left -= silent["unmask"]
    return None if short(graph, dealt, survivors, left, parameters.threshold) else survivors


def naive_core(graph: Topology, members: set[int], threshold: int, partners: int = 0) -> set[int]:
    """Remove one client at a time until each has enough holders and, where clients choose, enough of its first choices."""
    left = set(members)

    def lonely(me: int) -> bool:
        alone = isinstance(graph, ChosenGraph) and len(left.intersection(graph.firsts(me))) < partners
        return alone or len(left.intersection(graph.holders(me))) < threshold

    while found := [me for me in left if lonely(me)]:
        left.remove(found[0])
    return left


def short(graph: Topology, dealt: set[int], survivors: set[int], present: set[int], threshold: int) -> bool:
    """Whether too few holders are present for a needed secret: of a survivor, or of a client whose masks are in the sum."""
    needed = {me for me in dealt if me in survivors or survivors.intersection(graph.partners(me))}
    return any(len(present.intersection(graph.holders(me))) < threshold for me in needed)


def together(graph: Topology, survivors: set[int], window: int, partners: int) -> bool:
    """Whether every k / 2 consecutive ring places have more than `window` survivors; True on a complete graph.

    Where clients choose: whether each survivor has at least `partners` survivors among its first choices.
    """
    if isinstance(graph, ChosenGraph):
        return all(len(survivors.intersection(graph.firsts(me))) >= partners for me in survivors)
    if graph.complete:
        return True
    around, half = [*graph.order, *graph.order], graph.k // 2
    return all(len(survivors.intersection(around[at : at + half])) > window for at in range(len(graph.order)))


def test_the_core_is_what_is_left_when_the_lonely_are_taken_out_one_by_one() -> None:
    rng = random.Random(3)
    partial = 0
    for turn in range(200):
        graph = ring(range(24), 8, bytes([turn] * 32)) if turn % 5 else complete(range(8))
        members = {one for one in graph.order if rng.random() < 0.75}
        threshold = rng.choice([2, 4, 5])
        found = core(graph, members, threshold)
        assert found == naive_core(graph, members, threshold)
        partial += 0 < len(found) < len(members)
    assert partial > 10


BLOCKS, SCHEDULES, FEW = 20, 100, 12  # blocks can run in parallel


def found(session: Session, held: bytes) -> list[str]:
    """The names of the secrets that these bytes contain. A value equal to the released sum is not a secret."""
    total = session.server.total().tobytes() if session.server.stage == "done" else None
    return [name for name, form in session.secrets() if form in held and form != total]


def judge(session: Session) -> str:
    """Play a session and check its result. Returns "sum", or the stage in which it aborted."""
    done, server = session.run(), session.server
    held = contents((server, remains(session.error)))
    assert found(session, held) == []
    assert (set(server.survivors) if done else None) == foretold(session)
    if done:
        assert server.total().tobytes() == Play(session.cast, server, {}, session.vectors).expected().tobytes()
        assert server.total().tobytes() in held  # the search finds bytes that the server holds
        return "sum"
    assert server.stage == "aborted"
    assert session.error is not None
    assert session.error.stage == session.stage
    with pytest.raises(MessageError, match="there is no sum"):
        server.total()
    assert not server._accumulator.any()
    return session.stage


def judged(seeds: range) -> Counter[str]:
    outcomes = Counter[str]()
    for seed in seeds:
        try:
            outcomes[judge(Session(seed))] += 1
        except BaseException as error:
            error.add_note(f"in the session of seed {seed}: judge(Session({seed})) repeats it")
            raise
    return outcomes


def enough(outcomes: Counter[str], count: int, kinds: int = 5) -> None:
    """Check that sums and aborts are both frequent, and that sessions abort in many stages."""
    assert count / 4 < outcomes["sum"] < 3 * count / 4, outcomes
    assert len(outcomes) >= kinds, outcomes


def test_random_schedules() -> None:
    enough(judged(range(FEW)), FEW, kinds=3)


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(2))
def test_hundreds_of_random_schedules(block: int) -> None:
    enough(judged(range(block * SCHEDULES, (block + 1) * SCHEDULES)), SCHEDULES)


@pytest.mark.weekly
@pytest.mark.parametrize("block", range(2, BLOCKS))
def test_thousands_of_random_schedules(block: int) -> None:
    enough(judged(range(block * SCHEDULES, (block + 1) * SCHEDULES)), SCHEDULES)


def keep_everything(server: Server) -> None:
    server.stage = "aborted"


def keep_shares(server: Server) -> None:
    server.stage = "aborted"
    server._accumulator[:] = 0


def keep_a_vector(server: Server, sender: int, message: bytes) -> None:
    vector = Masked.from_bytes(message, server.parameters, sender).vector
    server._accumulator += vector
    server.__dict__.setdefault("_log", []).append({sender: lambda: tuple(vector.tolist())})


def forget_a_mask(*arguments: Any) -> Any:
    masks, suspects = masks_left(*arguments)
    return masks[1:], suspects


@pytest.mark.parametrize(
    ("place", "broken"),
    [
        ("server.Server._abort", keep_everything),
        pytest.param("server.Server._abort", keep_shares, marks=pytest.mark.nightly),
        ("server.Server._take_vector", keep_a_vector),
        ("server.masks_left", forget_a_mask),
        pytest.param("graph.Graph.holds_together", lambda graph, alive, window: True, marks=pytest.mark.nightly),
    ],
)
def test_a_machine_that_keeps_or_miscounts_something_is_caught(
    place: str, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"protocols.{place}", broken)
    with pytest.raises((AssertionError, ProtocolError, KeyError)) as caught:
        judged(range(SCHEDULES))
    assert "in the session of seed" in caught.value.__notes__[-1]


def test_the_search_goes_everywhere() -> None:
    """Bytes in any place where an object can keep them are found, and bytes that are not there are not."""
    words, keys = np.arange(1, 9, dtype=np.uint32), drawn(random.Random(1))
    needle, other = words.tobytes(), keys.mask.private.reveal()

    class Slotted:
        __slots__ = ("inside",)

    def holder(value: object) -> Slotted:
        made = Slotted()
        made.inside = [{"deep": (value,)}]  # type: ignore[attr-defined]
        return made

    hidden = [words, words[:2], words.tolist(), set(words.tolist()), dict(enumerate(words.tolist())), needle.hex()]
    hidden += [bytearray(needle), lambda: words, memoryview(needle)[3:4], Secret(needle), iter([needle])]
    hidden += [int.from_bytes(needle, "little"), np.array([words, 1], dtype=object)]
    for thing in hidden:
        assert needle in contents(holder(thing)), thing
        assert other not in contents(holder(thing))
    for thing in (keys, keys.mask, keys.mask.private):
        assert other in contents(holder(thing))
    assert needle not in contents(holder(words[::-1].copy()))
