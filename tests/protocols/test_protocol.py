"""Whole sessions: with any dropouts at any stage the result is the plain sum bit for bit or none, and no party learns more."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

import protocols
import protocols.client
from protocols.client import Client, Keys
from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError
from protocols.graph import ChosenGraph, Graph, choices, complete, ring
from protocols.keys import Secret, pair_mask
from protocols.masking import add_masks
from protocols.parameters import stages
from protocols.server import Server, core
from protocols.wire import Masked, Opened, Shares
from tests.protocols.randomness import CHANCE
from tests.protocols.sessions import Cast, Play, cast, play

CASTS = {
    "complete": {},
    "complete, active": {"active": True},
    "ring": {"count": 9, "neighbours": 4, "threshold": 3},
    "ring, active": {"count": 9, "neighbours": 4, "threshold": 3, "active": True},
    "64 bits": {"bits": 64, "bound": 2**40},
    "two clients": {"count": 2, "threshold": 1},
}
every_cast = pytest.mark.parametrize("options", CASTS.values(), ids=CASTS)


def equal(scene: Play) -> bool:
    return scene.server.total().tolist() == scene.expected().tolist()


@every_cast
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


@pytest.mark.parametrize("stage", ["advertise", "share", "mask"])
def test_who_drops_before_its_vector_is_out_is_left_out_of_the_sum(stage: str) -> None:
    made = cast(count=6, threshold=3)
    scene = play(made, silent={stage: made.ids[:2]})
    assert scene.server.survivors == made.ids[2:]
    assert equal(scene)


@pytest.mark.parametrize(("stage", "active"), [("unmask", False), ("unmask", True), ("consistency", True)])
def test_who_drops_after_its_vector_is_out_is_in_the_sum(stage: str, active: bool) -> None:
    made = cast(count=7, threshold=4, active=active)
    scene = play(made, silent={stage: made.ids[:2]})
    assert scene.server.survivors == made.ids
    assert equal(scene)


def schedule(made: Cast, rng: random.Random) -> dict[str, set[int]]:
    """The clients that drop out at each stage. Each drops out with a probability that differs between schedules."""
    share = rng.choice([0.05, 0.15, 0.4])
    silent: dict[str, set[int]] = {}
    for client in made.ids:
        if rng.random() < share:
            silent.setdefault(rng.choice(stages(made.parameters)), set()).add(client)
    return silent


def finishes(made: Cast, silent: Mapping[str, set[int]]) -> set[int] | None:
    """The survivors on a complete graph, by counting alone; None if the session must abort."""
    left, survivors, least = set(made.ids), set[int](), max(made.survivors, made.parameters.threshold + 1)
    for stage in stages(made.parameters):
        left -= silent.get(stage, set())
        if stage == "mask":
            survivors = set(left)
        if len(left) < least and stage not in ("consistency", "unmask"):
            return None
        spare = 1 if left & survivors else 0  # a client does not hold its own shares
        if stage in ("consistency", "unmask") and len(left) - spare < made.parameters.threshold:
            return None
    return survivors


def tried(made: Cast, silent: Mapping[str, set[int]], seed: int) -> Play | None:
    """The finished session; None if it aborted, after a check that the server holds no sum."""
    server = made.server()
    try:
        return play(made, silent=silent, seed=seed, server=server)
    except Aborted as error:
        protected = error.protected
    assert protected
    assert server.stage == "aborted"
    assert not server._accumulator.any()
    with pytest.raises(MessageError, match="there is no sum"):
        server.total()
    return None


def dropouts(name: str, count: int, seed: int) -> tuple[int, int]:
    """The numbers of random schedules that ended with a sum and without one. Each result is checked."""
    made, rng = cast(**CASTS[name], length=3) if "bits" not in name else cast(**CASTS[name]), random.Random(seed)
    done = aborted = 0
    for turn in range(count):
        silent = schedule(made, rng)
        scene = tried(made, silent, turn)
        if made.parameters.complete:
            expected = finishes(made, silent)
            assert (scene and set(scene.server.survivors)) == expected, silent
        if scene is None:
            aborted += 1
            continue
        done += 1
        assert equal(scene), silent
    return done, aborted


@pytest.mark.parametrize("name", CASTS)
def test_random_dropouts_at_every_stage(name: str) -> None:
    done, aborted = dropouts(name, 25, seed=1)
    assert done > 3
    assert aborted > 3


def test_a_client_whose_neighbours_are_gone_does_not_take_the_session_with_it() -> None:
    """On a ring, so many of a client's neighbours drop out before they deal shares that too few are left to hold its own."""
    made, rng = cast(count=40, neighbours=12, threshold=6), random.Random(4)
    asked = play(made, until="share")
    keys = {me: client._keys for me, client in asked.clients.items()}
    graph = asked.server._graph  # it depends only on the roster: the same keys give the same graph
    # Dropouts are drawn by place on the ring, not by id, so every run finds the same places, whatever the keys.
    for _ in range(5000):
        silent = {one for one in graph.order if rng.random() < 0.35}
        left = core(graph, set(made.ids) - silent, 6)
        if len(silent) + len(left) < 40 and left and graph.holds_together(left, 0):
            break
    scene = play(made, silent={"share": silent}, clients={me: made.client(me, _keys=keys[me]) for me in made.ids})
    assert set(scene.server.survivors) == naive_core(graph, set(made.ids) - silent, 6)
    assert len(left) < 40 - len(silent)
    assert equal(scene)


def naive_core(graph: Graph, members: set[int], threshold: int) -> set[int]:
    """Remove one member at a time until each has at least `threshold` neighbours."""
    left = set(members)
    while short := [one for one in left if len(left & set(graph.neighbours(one))) < threshold]:
        left.remove(short[0])
    return left


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


def uniform(data: bytes) -> bool:
    """Whether the frequencies of bytes differ from uniform neither more nor less than chance allows."""
    counts = np.bincount(np.frombuffer(data, np.uint8), minlength=256)
    return bool(CHANCE < stats.chisquare(counts).pvalue < 1 - CHANCE)


def masked(length: int = 20_000) -> tuple[Play, int, NDArray[Any]]:
    """A session played until the masked vectors are sent, one client as the victim, and the victim's masked vector."""
    made = cast(count=6, threshold=4, length=length)
    scene = play(made, until="unmask")
    victim = made.ids[2]
    return scene, victim, Masked.from_bytes(scene.said["mask", victim], made.parameters, victim).vector.copy()


def unmask_with(scene: Play, victim: int, keys: Mapping[int, Keys], vector: NDArray[Any]) -> NDArray[Any]:
    """The victim's masked vector, from which the pair masks that these clients know are removed in place."""
    session = scene.cast.parameters.session
    public = scene.clients[victim]._advert.mask
    masks = [pair_mask(known.mask, public, session, client, victim) for client, known in keys.items()]
    add_masks(vector, masks)
    return vector


def colluders(scene: Play, victim: int) -> dict[int, Keys]:
    known = {me: client._keys for me, client in scene.clients.items() if me != victim}
    return {me: keys for me, keys in known.items() if keys is not None}


def test_a_masked_vector_is_uniform() -> None:
    scene, victim, vector = masked()
    assert not uniform(scene.vectors[victim].tobytes())
    assert not uniform(bytes(range(256)) * 300)
    assert uniform(vector.tobytes())


def test_a_masked_vector_is_uniform_to_a_server_with_the_secrets_of_fewer_than_the_threshold() -> None:
    scene, victim, vector = masked()
    everybody = colluders(scene, victim)
    some = dict(list(everybody.items())[: scene.cast.parameters.threshold - 1])
    assert uniform(unmask_with(scene, victim, some, vector).tobytes())


def test_pair_masks_alone_do_not_hide_what_everybody_else_would_tell() -> None:
    """The tests above can fail: without pair masks the self mask alone hides the vector, and without both nothing does."""
    scene, victim, vector = masked()
    naked = unmask_with(scene, victim, colluders(scene, victim), vector)
    assert uniform(naked.tobytes())
    keys = scene.clients[victim]._keys
    assert keys is not None
    add_masks(naked, [(keys.seed, -1)])
    assert naked.tolist() == scene.vectors[victim].tolist()


def reachable(thing: object, seen: set[int]) -> Iterator[object]:
    """The object and all objects reachable from it through attributes and containers."""
    if id(thing) in seen:
        return
    seen.add(id(thing))
    yield thing
    inside: list[object] = list(vars(thing).values()) if hasattr(thing, "__dict__") else []
    if isinstance(thing, Mapping):
        inside += [*thing.keys(), *thing.values()]
    elif isinstance(thing, list | tuple | set | frozenset):
        inside += list(thing)
    for part in inside:
        yield from reachable(part, seen)


def large(server: Server, least: int) -> list[object]:
    """All arrays and byte strings of at least `least` bytes that a server holds."""
    held = reachable(server, set())
    return [
        part for part in held if isinstance(part, np.ndarray | bytes | bytearray | memoryview) and _size(part) >= least
    ]


def _size(part: object) -> int:
    return int(getattr(part, "nbytes", 0)) or len(part)  # type: ignore[arg-type]


def test_a_server_holds_one_vector_and_nobodys() -> None:
    made = cast(count=5, length=5000)
    server = made.server()
    scene = play(made, server=server, until="unmask")
    assert [id(part) for part in large(server, 4 * 5000)] == [id(server._accumulator)]
    both = [server._accumulator.tobytes(), *(scene.said["mask", me][48:] for me in made.ids)]
    assert len(set(both)) == 6


def test_after_a_session_nobody_holds_secrets() -> None:
    scene = play(cast(active=True))
    for machine in (scene.server, *scene.clients.values()):
        kept = [part for part in reachable(machine, set()) if isinstance(part, Secret)]
        assert kept == []


def test_fresh_keys_for_every_client_and_session() -> None:
    first, second = play(cast()), play(cast())
    adverts = [
        message[48:112]
        for scene in (first, second)
        for (stage, _), message in scene.said.items()
        if stage == "advertise"
    ]
    keys = {advert[:32] for advert in adverts} | {advert[32:] for advert in adverts}
    assert len(keys) == 20


def test_choices_are_uniform_and_depend_on_the_seed_alone() -> None:
    """All ordered pairs of other clients are equally frequent, and a longer choice begins with the shorter one."""
    clients, rng = (2, 5, 6, 9, 11), random.Random(5)
    seen: Counter[tuple[int, ...]] = Counter()
    for _ in range(3_000):
        seed = rng.randbytes(32)
        pair = choices(seed, clients, 6, 2)
        assert choices(seed, clients, 6, 4)[:2] == pair
        seen[pair] += 1
    assert set(seen) == {(one, other) for one in clients for other in clients if one != other and 6 not in (one, other)}
    assert sum((count - 250) ** 2 / 250 for count in seen.values()) < 35  # chi-square of 11, p < 1e-3
    with pytest.raises(ParameterError, match="cannot be chosen"):
        choices(bytes(31), clients, 6, 2)


def test_the_relations_of_a_chosen_graph_are_each_others_inverses() -> None:
    rng = random.Random(6)
    clients = tuple(range(0, 60, 3))
    chosen = {me: choices(rng.randbytes(32), clients, me, 6) for me in clients}
    for members in (clients, clients[::2], clients[4:17]):
        graph = ChosenGraph({member: chosen[member] for member in members}, 3)
        assert graph.order == members
        for me in members:
            assert graph.holders(me) == tuple(sorted(set(chosen[me]) & set(members)))
            assert graph.firsts(me) == tuple(sorted(set(chosen[me][:3]) & set(members)))
            assert set(graph.owners(me)) == {one for one in members if me in chosen[one]}
            assert set(graph.first_of(me)) == {one for one in members if me in chosen[one][:3]}
            assert set(graph.partners(me)) == {*graph.firsts(me), *graph.first_of(me)}
            assert all(me in graph.partners(other) for other in graph.partners(me))


def test_messages_have_the_sizes_that_were_promised() -> None:
    scene = play(cast(count=5, length=10))
    sizes = {
        stage: {len(message) for (at, _), message in scene.said.items() if at == stage}
        for stage in stages(scene.cast.parameters)
    }
    assert sizes == {"advertise": {112}, "share": {48 + 36 + 4 * 86}, "mask": {48 + 40}, "unmask": {48 + 8 + 4 * 37}}


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


def test_an_exception_shows_no_secret_and_neither_does_a_machine() -> None:
    scene = play(cast(), until="unmask")
    keys = next(iter(scene.clients.values()))._keys
    assert isinstance(keys, Keys)
    assert repr(keys).count("redacted") == 2
    assert keys.seed.reveal().hex() not in repr(vars(scene.clients[3]))
    assert keys.seed.reveal() != scene.clients[5]._keys.seed.reveal()  # type: ignore[union-attr]


def test_a_client_is_neither_copied_nor_stored() -> None:
    import copy
    import pickle

    client = cast().client(3)
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError):
            attempt(client)  # type: ignore[operator]


@pytest.mark.parametrize("count", [1, 4])
def test_threads_do_not_change_a_bit(count: int) -> None:
    made = cast(count=4, threshold=2, length=400_000)
    keys = {me: Keys.new() for me in made.ids}
    clients = {me: Client(made.parameters, me, made.policy, threads=count, _keys=keys[me]) for me in made.ids}
    scene = play(made, clients=clients, silent={"mask": made.ids[:1]})
    assert equal(scene)


def test_an_error_says_whose_it_is_and_what_is_protected() -> None:
    made = cast(count=5, threshold=3)
    scene = play(made, tell=lambda stage, client, message: message[:-1] if (stage, client) == ("mask", 3) else message)
    assert set(scene.errors) == {3}
    assert isinstance(scene.errors[3], ProtocolError)
    assert str(scene.errors[3]).endswith("[the server, stage mask]: this client's vector was not sent")
    assert equal(scene)
