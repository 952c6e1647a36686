"""The lies that a simulated session can contain, by kind: what `secure-fed secagg --tamper KIND` plays.

Each lie is one function, whose name is its kind and whose docstring says what the liar does. Its decorator states who must
notice the lie, in which stage and by which error (`scene.Attack`). The decorated function changes a message: the parameters of
the invitation, a client's answer, or a message of the server.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, Spent, Tampering
from protocols.keys import AgreementKey, Identity, Secret, pair_mask, registry_digest
from protocols.masking import add_masks
from protocols.parameters import Parameters, Policy
from protocols.roster import near
from protocols.scene import PARAMETERS, SERVER, Attack, Inbox, Scene, play
from protocols.wire import (
    HEADER,
    SEALED,
    SIGNATURE,
    Advertise,
    Confirm,
    Confirmations,
    Delivery,
    Masked,
    Opened,
    Roster,
    Shares,
    Survivors,
    seeds,
)

Tell = Callable[[Scene, str, Inbox], Inbox]
Send = Callable[[Scene, str, int, bytes], None]
Adverts = dict[int, Advertise]

ATTACKS: dict[str, Attack] = {}  # by kind, in the order of this file
_BYSTANDERS = 2  # clients in an earlier session beside the three roles


def attack_of(kind: str) -> Attack:
    """The attack of this kind; ParameterError if there is none."""
    if kind not in ATTACKS:
        raise ParameterError(f"tamper is {kind!r:.80}: choose one of {', '.join(ATTACKS)}")
    return ATTACKS[kind]


def lie(
    catcher: str,
    stage: str,
    error: type[ProtocolError],
    hook: str,
    how: Callable[[Any], Any] = lambda function: function,
    **more: Any,
) -> Callable[[Any], Any]:
    """Add the attack whose `hook` is made by `how` from the decorated function, with its name as kind and its docstring."""

    def add(function: Any) -> Any:
        kind, does = function.__name__.replace("_", "-"), " ".join(function.__doc__.split())
        ATTACKS[kind] = Attack(kind, does, catcher, stage, error, **{hook: how(function)}, **more)
        return function

    return add


def false_answer(stage: str, error: type[ProtocolError], noticed: str = "", **more: Any) -> Callable[[Any], Any]:
    """In this stage the liar sends a changed message. The server must refuse it at once, or notice it in stage `noticed`."""

    def sending(change: Callable[[Scene, bytes], bytes]) -> Send:
        def send(scene: Scene, now: str, client: int, answer: bytes) -> None:
            lies = (now, client) == (stage, scene.liar)
            if lies and noticed:
                scene.expect(SERVER)
            scene.deliver(client, change(scene, answer) if lies else answer, lie=lies and not noticed)

        return send

    return lie("server", noticed or stage, error, "send", sending, **more)


false_session = partial(lie, "clients", PARAMETERS, ParameterError, "propose")
false_roster = partial(lie, "clients", "roster", hook="tell")
false_list = partial(lie, "clients", "survivors", hook="tell")


def told(stage: str) -> Callable[[Callable[[Scene, Inbox], Inbox]], Tell]:
    """In this stage, or where the "roster" or the "survivors" are shown, the server sends changed messages."""

    def made(change: Callable[[Scene, Inbox], Inbox]) -> Tell:
        return lambda scene, now, inbox: change(scene, inbox) if now == scene.stage_of(stage) else inbox

    return made


def kept_back(stage: str, role: str) -> Send:
    """The answer of the client in this role does not reach the server in this stage."""

    def send(scene: Scene, now: str, client: int, answer: bytes) -> None:
        if (now, client) != (stage, getattr(scene, role)):
            scene.deliver(client, answer)

    return send


def forged(scene: Scene) -> Advertise:
    """Forged keys, to replace another client's."""
    return Advertise(AgreementKey.new().public, AgreementKey.new().public, bytes(seeds(scene.parameters)))


def signed(scene: Scene, advert: Advertise, owner: int, identity: Identity | None) -> Advertise:
    """The advertisement, signed by this identity in the owner's name if the session is active."""
    if not scene.parameters.active or identity is None:
        return advert
    return replace(advert, signature=identity.sign("advertise", scene.parameters.session, advert.signed(owner)))


def earlier(scene: Scene) -> Scene:
    """A session of the previous round without lies, with the same stages and identities, in which the three roles took part.

    Few others took part, since their number changes nothing.
    """
    roles = {scene.peer, scene.victim, scene.liar}
    others = [client for client in scene.clients if client not in roles][:_BYSTANDERS]
    invited = tuple(sorted({*roles, *others}))
    identities = {client: scene.identities[client] for client in invited if client in scene.identities}
    public = {client: identity.public for client, identity in identities.items()}
    size, chosen = len(invited), scene.parameters.chosen
    parameters = replace(
        scene.parameters,
        round=scene.parameters.round - 1,
        clients=invited,
        neighbours=2 if chosen else size - 1,
        threshold=2 if chosen else size - 1,
        survivors=size if chosen else 2,
        partners=int(chosen),
        registry=registry_digest(public, invited) if scene.parameters.active else bytes(32),
    )
    policy = Policy(threshold=parameters.threshold, survivors=2, active=parameters.active, identities=public)
    before = Scene(parameters, policy, identities, {}, peer=scene.peer, victim=scene.victim, liar=scene.liar)
    play(before)
    return before


def listing(scene: Scene, survivors: Collection[int], client: int) -> bytes:
    """A list of survivors for one client, with the signatures of the clients near it that the server has."""
    given = scene.server._statements
    around = near(client, scene.server._graph, survivors) if scene.parameters.active else ()
    statements = {one: given.get(one, bytes(SIGNATURE)) for one in around}
    return Survivors(tuple(sorted(survivors)), statements).to_bytes(scene.parameters)


@false_answer("mask", Tampering, noticed="unmask")
def weak_masks(scene: Scene, answer: bytes) -> bytes:
    """A client's masks come from a Mersenne Twister seeded with 32 bits; what is taken off is another stream, so no sum
    comes out.
    """
    client = scene.clients[scene.liar]
    keys, session, adverts = client._keys, scene.parameters.session, client._agreed.adverts
    if keys is None:
        return answer
    partners = client._graph.partners(client.me) if scene.parameters.active else client._held
    pairs = [pair_mask(keys.mask, adverts[other].mask, session, client.me, other) for other in partners]
    message = bytearray(answer)
    vector = Masked.from_bytes(message, scene.parameters, scene.liar).vector
    for secret, sign in [(keys.seed, 1), *pairs]:
        add_masks(vector, [(secret, -sign)])
        stream = random.Random(int.from_bytes(secret.reveal()[:4], "little")).randbytes(vector.nbytes)
        combine = np.add if sign > 0 else np.subtract
        combine(vector, np.frombuffer(stream, vector.dtype), out=vector)
    return bytes(message)


@false_answer("mask", Tampering, noticed="unmask")
def beyond_bound(scene: Scene, answer: bytes) -> bytes:
    """A client adds a quarter of all that a word holds to each coordinate of its vector."""
    message = bytearray(answer)
    vector = Masked.from_bytes(message, scene.parameters, scene.liar).vector
    vector += vector.dtype.type(2 ** (scene.parameters.bits - 2))
    return bytes(message)


@false_answer("mask", MessageError, exact=True)
def clear_metadata(scene: Scene, answer: bytes) -> bytes:
    """A client appends its example count and a metric, in clear, to its masked vector."""
    return answer + b'{"examples": 412, "loss": 0.31}'


@false_answer("advertise", Tampering, exact=True)
def small_order(scene: Scene, answer: bytes) -> bytes:
    """A client advertises a mask key of small order, with which anybody agrees on the same secret."""
    return _changed_advert(scene, answer, bytes(32))


@false_answer("advertise", Tampering, exact=True)
def copied_key(scene: Scene, answer: bytes) -> bytes:
    """A client advertises the mask key of another client as its own."""
    of_peer = Advertise.from_bytes(scene.answers["advertise", scene.peer], scene.parameters, scene.peer)
    return _changed_advert(scene, answer, of_peer.mask)


def _changed_advert(scene: Scene, answer: bytes, mask: bytes) -> bytes:
    advert = replace(Advertise.from_bytes(answer, scene.parameters, scene.liar), mask=mask)
    return signed(scene, advert, scene.liar, scene.identities.get(scene.liar)).to_bytes(scene.parameters, scene.liar)


@lie("server", "advertise", MessageError, "closing", exact=True)
def repeated_id(scene: Scene, stage: str) -> None:
    """Somebody advertises keys of its own under the number of a client that has advertised."""
    if stage == "advertise":
        advert = signed(scene, forged(scene), scene.peer, Identity.new())
        scene.deliver(scene.peer, advert.to_bytes(scene.parameters, scene.peer), lie=True)


@false_answer("advertise", Tampering, active=True, exact=True)
def impostor(scene: Scene, answer: bytes) -> bytes:
    """A client signs its keys with an identity that is not the registered one."""
    advert = Advertise.from_bytes(answer, scene.parameters, scene.liar)
    return signed(scene, advert, scene.liar, Identity.new()).to_bytes(scene.parameters, scene.liar)


@false_answer("share", MessageError, exact=True)
def self_share(scene: Scene, answer: bytes) -> bytes:
    """A client deals a share to itself."""
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    sealed = dict(shares.sealed)
    sealed[scene.liar] = next(iter(sealed.values()))
    return replace(shares, sealed=sealed).to_bytes(scene.parameters, scene.liar)


@false_answer("share", MessageError, active=True, ring=True, exact=True)
def changed_choice(scene: Scene, answer: bytes) -> bytes:
    """A client deals its shares to others than it chose when it advertised."""
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    sealed = dict(shares.sealed)
    stranger = next(one for one in scene.parameters.clients if one not in sealed and one != scene.liar)
    sealed[stranger] = sealed.pop(next(iter(sealed)))
    return replace(shares, sealed=sealed).to_bytes(scene.parameters, scene.liar)


@false_answer("share", Tampering, noticed="unmask")
def wrong_commitment(scene: Scene, answer: bytes) -> bytes:
    """A client commits itself to another seed than the one it shares."""
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    return replace(shares, commitment=Secret.new().reveal()).to_bytes(scene.parameters, scene.liar)


@false_answer("unmask", Tampering, noticed="unmask", exact=True)
def wrong_share(scene: Scene, answer: bytes) -> bytes:
    """A client opens a wrong share of everybody; it is named, and the sum comes out all the same."""
    opened = Opened.from_bytes(answer, scene.parameters, scene.liar)
    seeds, keys = (
        {owner: bytes([share[0] ^ 1]) + share[1:] for owner, share in shares.items()}
        for shares in (opened.seeds, opened.keys)
    )
    return Opened(seeds, keys).to_bytes(scene.parameters, scene.liar)


@lie("server", "share", ProtocolError, "outcome", exact=True, send=kept_back("share", "liar"))
def early_drop(scene: Scene) -> str:
    """A client vanishes before its shares are out; the sum of the others comes out all the same."""
    if scene.server.stage != "done" or scene.liar in scene.server.survivors:
        return ""
    return f"client {scene.liar} dealt no shares, and the sum is over the {len(scene.server.survivors)} others"


@lie("server", "", MessageError, "send", exact=True)
def replay(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """In every stage a message of an earlier session comes first, and the right one comes twice."""
    if client != scene.liar:
        scene.deliver(client, answer)
        return
    if scene.kept is None:
        scene.kept = earlier(scene)
    scene.deliver(client, scene.kept.answers[stage, client], lie=True)
    scene.deliver(client, answer)
    scene.deliver(client, answer, lie=True)


@false_session()
def low_threshold(parameters: Parameters) -> Parameters:
    """The server asks its clients into a session with a lower threshold."""
    # The lowest threshold that an active session can have; in a passive one, a single share opens everything.
    least = parameters.holders // 2 + 1 if parameters.active else 1
    return replace(parameters, threshold=min(least, parameters.threshold - 1))


@false_session()
def small_sum(parameters: Parameters) -> Parameters:
    """The server asks its clients into a session that releases sums of fewer than they agreed on, of two if it can."""
    # Where clients choose, the smallest number that can agree on one list of survivors.
    least = len(parameters.clients) // 2 + 1 if parameters.chosen else 2
    return replace(parameters, survivors=min(least, parameters.survivors - 1))


@false_session(active=True)
def downgrade(parameters: Parameters) -> Parameters:
    """The server asks clients that want an active session into a passive one."""
    return replace(parameters, active=False, registry=bytes(32), partners=0)


@false_session(active=True)
def foreign_registry(parameters: Parameters) -> Parameters:
    """The server asks its clients into a session with identities that it has made itself."""
    identities = {client: Identity.new().public for client in parameters.clients}
    return replace(parameters, registry=registry_digest(identities, parameters.clients))


def roster_for_all(change: Callable[[Scene, Adverts], None]) -> Tell:
    """All clients but the peer are shown a changed roster; the peer would recognise its own keys."""

    def shown(scene: Scene, inbox: Inbox) -> Inbox:
        false = _changed_roster(scene, inbox[scene.peer], change)
        return {client: message if client == scene.peer else false for client, message in inbox.items()}

    return told("roster")(shown)


def roster_near_peer(change: Callable[[Scene, Adverts], None]) -> Tell:
    """All clients whose roster contains the peer are shown a changed roster."""

    def shown(scene: Scene, inbox: Inbox) -> Inbox:
        return {
            client: _changed_roster(scene, message, change)
            if client != scene.peer and scene.peer in Roster.from_bytes(message, scene.parameters).adverts
            else message
            for client, message in inbox.items()
        }

    return told("roster")(shown)


def _changed_roster(scene: Scene, message: bytes, change: Callable[[Scene, Adverts], None]) -> bytes:
    """The roster of that message with its advertisements changed."""
    adverts = dict(Roster.from_bytes(message, scene.parameters).adverts)
    change(scene, adverts)
    return Roster(adverts).to_bytes(scene.parameters)


def shares_for_victim(change: Callable[[Scene, dict[int, bytes]], None]) -> Tell:
    """The victim receives other shares than were dealt."""

    def brought(scene: Scene, inbox: Inbox) -> Inbox:
        true = Delivery.from_bytes(inbox[scene.victim], scene.parameters)
        sealed = dict(true.sealed)
        change(scene, sealed)
        return {**inbox, scene.victim: Delivery(sealed, true.dealt).to_bytes(scene.parameters)}

    return told("mask")(brought)


@false_roster(Tampering, how=roster_for_all, active=True)
def swapped_key(scene: Scene, adverts: Adverts) -> None:
    """The server shows all others its own keys in the place of one client's, to sit in the middle."""
    adverts[scene.peer] = signed(scene, forged(scene), scene.peer, Identity.new())


@false_roster(Tampering, how=roster_for_all, active=True)
def reused_key(scene: Scene, adverts: Adverts) -> None:
    """The server shows all others the keys that one client advertised in an earlier session, with its signature of then."""
    # Genuine, from the previous session, in which the server may have rebuilt the key.
    before = earlier(scene)
    adverts[scene.peer] = Advertise.from_bytes(before.answers["advertise", scene.peer], before.parameters, scene.peer)


@false_roster(Tampering, how=roster_for_all)
def small_order_roster(scene: Scene, adverts: Adverts) -> None:
    """The server shows all others a mask key of small order as one client's."""
    adverts[scene.peer] = replace(adverts[scene.peer], mask=bytes(32))


@false_roster(Tampering, how=roster_for_all)
def uninvited(scene: Scene, adverts: Adverts) -> None:
    """The server puts a client of its own on the roster."""
    stranger = scene.parameters.clients[-1] + 1
    adverts[stranger] = signed(scene, forged(scene), stranger, Identity.new())


@false_roster(Aborted, how=told("roster"))
def short_roster(scene: Scene, inbox: Inbox) -> Inbox:
    """The server shows a roster of fewer clients than the least sum has."""
    # Where clients choose, the victim is shown too few of its choices; otherwise all are shown a roster that is too short.
    adverts = dict(Roster.from_bytes(inbox[scene.victim], scene.parameters).adverts)
    if scene.parameters.chosen:
        hidden = scene.server._graph.holders(scene.victim)[scene.parameters.threshold - 1 :]
        shown = {scene.victim}
    else:
        others = tuple(one for one in adverts if one not in (scene.peer, scene.victim))
        hidden = others[scene.parameters.survivors - 3 :]  # one client fewer is left than the least sum has
        shown = inbox.keys() - {scene.peer}
    for client in hidden:
        adverts.pop(client, None)
    false = Roster(adverts).to_bytes(scene.parameters)
    return {client: false if client in shown else true for client, true in inbox.items()}


@false_roster(Tampering, how=roster_near_peer, active=True, ring=True)
def surround(scene: Scene, adverts: Adverts) -> None:
    """The server shows those near a client another choice of neighbours than the client made, to surround whom it likes."""
    adverts[scene.peer] = replace(adverts[scene.peer], choice=bytes(32))


@lie("clients", "mask", Tampering, "tell", told("mask"), active=True, ring=True)
def other_choice(scene: Scene, inbox: Inbox) -> Inbox:
    """The server lists another choice of neighbours than a client made, so that masks are on one side only."""
    # All clients near the peer receive a list of dealers with another choice of the peer than it advertised.
    messages = dict(inbox)
    for client, message in inbox.items():
        if scene.peer in scene.clients[client]._agreed.adverts:
            true = Delivery.from_bytes(message, scene.parameters)
            false = replace(true, dealt={**true.dealt, scene.peer: bytes(32)})
            messages[client] = false.to_bytes(scene.parameters)
    return messages


@lie("clients", "", Tampering, "tell", active=True, ring=True)
def hidden_choice(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The server hides from one client that another chose it as a neighbour."""
    # The victim is a client that another chose one-sidedly. It notices once it reads everybody's choice, in the next stage.
    if stage == "share":
        graph, leaving = scene.server._graph, set().union(*scene.leaving.values())
        staying = [client for client in inbox if client not in leaving]
        one_sided = (
            (client, owner)
            for client in (scene.victim, *staying)
            for owner in graph.owners(client)
            if owner in staying and owner not in graph.holders(client)
        )
        scene.victim, hidden = next(one_sided)
        adverts = dict(Roster.from_bytes(inbox[scene.victim], scene.parameters).adverts)
        del adverts[hidden]
        return {**inbox, scene.victim: Roster(adverts).to_bytes(scene.parameters)}
    if stage == "mask":
        scene.expect(scene.victim)
    return inbox


def _whatever_it_signed(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """The server that lied to the victim accepts its vector nevertheless."""
    if (stage, client) != ("mask", scene.victim):
        scene.deliver(client, answer)
        return
    digest, scene.server._digest = scene.server._digest, scene.clients[client]._dealt
    scene.deliver(client, answer)
    scene.server._digest = digest


def _without(scene: Scene, inbox: Inbox, gone: Collection[int]) -> Inbox:
    """The victim's delivery omits the clients `gone`, as if they had not dealt."""
    true = Delivery.from_bytes(inbox[scene.victim], scene.parameters)
    false = [{one: entry for one, entry in part.items() if one not in gone} for part in (true.sealed, true.dealt)]
    return {**inbox, scene.victim: Delivery(*false).to_bytes(scene.parameters)}


@lie("clients", "consistency", Tampering, "tell", active=True, send=_whatever_it_signed)
def withheld_delivery(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The server says to one client that a neighbour has not dealt its shares, so that the two share no mask."""
    # The victim notices by the list of survivors, and the clients near it by its signature.
    if stage == "mask":
        return _without(scene, inbox, scene.server._graph.partners(scene.victim)[:1])
    if stage == "consistency":
        for client in inbox.keys() - scene.gone:
            if scene.victim in (client, *near(client, scene.server._graph, scene.server.survivors)):
                scene.expect(client)
    return inbox


@lie("clients", "mask", Aborted, "tell", told("mask"))
def deserted(scene: Scene, inbox: Inbox) -> Inbox:
    """The server says to one client that its neighbourhood dropped out, all but a few that collude."""
    graph = scene.server._graph
    around = sorted({*graph.holders(scene.victim), *graph.owners(scene.victim)})
    return _without(scene, inbox, around[scene.parameters.threshold - 1 :])


@lie("clients", "mask", Tampering, "tell", shares_for_victim)
def altered_share(scene: Scene, sealed: dict[int, bytes]) -> None:
    """The server changes a bit of what one client sealed for another."""
    owner = next(iter(sealed))
    sealed[owner] = sealed[owner][:-1] + bytes([sealed[owner][-1] ^ 1])


@lie("clients", "mask", Tampering, "tell", shares_for_victim)
def own_share(scene: Scene, sealed: dict[int, bytes]) -> None:
    """The server delivers to a client a share in its own name."""
    sealed[scene.victim] = bytes(SEALED)


def list_for_victim(change: Callable[[Scene, set[int]], None]) -> Tell:
    """Only the victim is shown a changed list."""

    def shown(scene: Scene, inbox: Inbox) -> Inbox:
        survivors = set(scene.server.survivors)
        change(scene, survivors)
        return {**inbox, scene.victim: listing(scene, survivors, scene.victim)}

    return told("survivors")(shown)


def list_for_all(change: Callable[[Scene, set[int]], None]) -> Tell:
    """All clients on the changed list are shown it, and no other client is shown a list."""

    def shown(scene: Scene, inbox: Inbox) -> Inbox:
        survivors = set(scene.server.survivors)
        change(scene, survivors)
        return {client: listing(scene, survivors, client) for client in inbox if client in survivors}

    return told("survivors")(shown)


@false_list(Tampering, how=list_for_victim)
def left_out(scene: Scene, survivors: set[int]) -> None:
    """The server shows one client a list of survivors without it, though its vector is in the sum."""
    survivors.remove(scene.victim)


@false_list(Tampering, how=list_for_all)
def unlisted_survivor(scene: Scene, survivors: set[int]) -> None:
    """The server lists a survivor that is not on the roster."""
    survivors.add(scene.parameters.clients[-1] + 1)


@false_list(Tampering, how=told("survivors"), send=kept_back("share", "liar"))
def undealt_survivor(scene: Scene, inbox: Inbox) -> Inbox:
    """The server lists a survivor that dropped out before its shares were out; its neighbours notice."""
    false = {*scene.server.survivors, scene.liar}
    known = inbox if scene.parameters.active else scene.server._graph.holders(scene.liar)
    return {client: listing(scene, false, client) if client in known else true for client, true in inbox.items()}


@false_list(Aborted, how=list_for_all)
def short_list(scene: Scene, survivors: set[int]) -> None:
    """The server lists fewer survivors than the least sum has."""
    for client in sorted(survivors - {scene.victim})[scene.parameters.survivors - 2 :]:
        survivors.remove(client)


@false_list(Aborted, how=list_for_victim)
def isolated(scene: Scene, survivors: set[int]) -> None:
    """The server says to one client that all its neighbours dropped out after it had sent its vector."""
    survivors.difference_update(scene.server._graph.holders(scene.victim))


@false_list(Aborted, how=told("survivors"), ring=True)
def cut_ring(scene: Scene, inbox: Inbox) -> Inbox:
    """The server says that those dropped out who share masks with one client or two, so that these have a sum of their own."""
    graph: Any = scene.server._graph
    survivors = set(scene.server.survivors)
    if scene.parameters.chosen:  # the list omits all mask partners that the victim chose. It and its holders notice.
        survivors -= set(graph.firsts(scene.victim))
        shown = survivors & {scene.victim, *graph.holders(scene.victim)}
        return {
            client: listing(scene, survivors, client) if client in shown else true for client, true in inbox.items()
        }
    # Two windows of the ring are said to be gone, so that the two clients between them would have a sum of their own.
    half, place = scene.parameters.neighbours // 2, graph.order.index(scene.victim)
    turned = graph.order[place:] + graph.order[:place]
    survivors.difference_update(turned[half + 1 : 2 * half + 1], turned[2 * half + 3 : 3 * half + 3])
    return {client: listing(scene, survivors, client) for client in inbox if client in survivors}


@false_list(MessageError, how=told("survivors"))
def listed_twice(scene: Scene, inbox: Inbox) -> Inbox:
    """The server lists a survivor twice, so that fewer look like more."""
    # Encoded by hand, since the protocol's code never encodes such a list.
    end = HEADER.size + 4 + 4 * len(scene.server.survivors)  # of the list: signatures may follow
    return {client: true[: end - 4] + true[end - 8 : end - 4] + true[end:] for client, true in inbox.items()}


@false_list(MessageError, how=told("survivors"))
def stale_list(scene: Scene, inbox: Inbox) -> Inbox:
    """The server shows one client the list of survivors of an earlier session."""
    return {**inbox, scene.victim: earlier(scene).messages[scene.stage, scene.victim]}


@lie("clients", "unmask", MessageError, "closing", exact=True)
def both_shares(scene: Scene, stage: str) -> None:
    """The server asks all once more, with a list on which one survivor is missing, to have both its secrets opened."""
    if stage != "unmask":
        return
    false = set(scene.server.survivors) - {scene.peer}
    for client, machine in scene.clients.items():
        if client in scene.inbox and client not in {*scene.gone, scene.peer}:
            scene.lie(machine, "unmask", listing(scene, false, client))


def _keep_copy(scene: Scene, inbox: Inbox) -> Inbox:
    scene.kept = copy.copy(scene.clients[scene.victim])
    return inbox


@lie("clients", "unmask", Spent, "closing", exact=True, tell=told("unmask")(_keep_copy))
def second_unmask(scene: Scene, stage: str) -> None:
    """The server asks a client once more that was put back to the state before it answered."""
    if stage == "unmask":
        scene.lie(scene.kept, "unmask", scene.messages["unmask", scene.victim])


def _split(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """Half of the clients, not including the peer, are shown a list without the peer."""
    if stage != "consistency":
        return inbox
    survivors = set(scene.server.survivors)
    ordered = sorted(inbox, key=lambda client: client != scene.peer)
    half = (len(ordered) + 1) // 2
    scene.kept = [], []  # signatures over each list, by signer
    lists = dict.fromkeys(ordered[:half], survivors) | dict.fromkeys(ordered[half:], survivors - {scene.peer})
    return {client: listing(scene, shown, client) for client, shown in lists.items()}


def _keep_signatures(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """Keep signatures over two lists: a lying server needs them, and an honest server would end the session here."""
    if stage != "consistency":
        scene.deliver(client, answer)
        return
    side = scene.kept[scene.peer not in scene.clients[client]._survivors]
    side.append((client, Confirm.from_bytes(answer, scene.parameters, client).signature))


@lie("clients", "unmask", Aborted, "closing", active=True, tell=_split, send=_keep_signatures)
def split_survivors(scene: Scene, stage: str) -> None:
    """The server shows two lists of survivors, each to half of the clients, to have both secrets of one of them opened."""
    # Each side gets the signatures over its own list, all of them genuine.
    if stage != "consistency":
        return
    for side in scene.kept:
        message = Confirmations(dict(side)).to_bytes(scene.parameters)
        for client, _ in side:
            scene.lie(scene.clients[client], "unmask", message)


@lie("clients", "unmask", Tampering, "tell", active=True, send=kept_back("consistency", "victim"))
def forged_signatures(scene: Scene, stage: str, inbox: Inbox) -> Inbox:
    """The server shows one client another list than the rest, and signs that list in the others' names."""
    false = set(scene.server.survivors) - {scene.peer}
    if stage == "consistency":
        return {**inbox, scene.victim: listing(scene, false, scene.victim)}
    if stage != "unmask":
        return inbox
    session, shown = scene.parameters.session, scene.clients[scene.victim]
    signatures = {
        client: Identity.new().sign("survivors", session, Confirm.signed(client, shown._dealt, shown._list))
        for client in scene.server.survivors
        if client != scene.peer
    }
    return {**inbox, scene.victim: Confirmations(signatures).to_bytes(scene.parameters)}
