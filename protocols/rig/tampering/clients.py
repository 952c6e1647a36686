"""Keys, shares and messages of a client that lies, or vanishes. The server notices, or makes it good."""

from __future__ import annotations

from dataclasses import replace

from protocols.errors import MessageError, ProtocolError, Tampering
from protocols.keys import Identity, Secret
from protocols.messages import Advertise, Opened, Shares
from protocols.rig.attack import Attack
from protocols.rig.scene import Scene
from protocols.rig.tampering.means import earlier, forged, found_out, refused, signed, withheld


def _changed_advert(scene: Scene, answer: bytes, mask: bytes) -> bytes:
    advert = replace(Advertise.from_bytes(answer, scene.parameters, scene.liar), mask=mask)
    return signed(scene, advert, scene.liar, scene.identities.get(scene.liar)).to_bytes(scene.parameters, scene.liar)


def _small_order(scene: Scene, answer: bytes) -> bytes:
    return _changed_advert(scene, answer, bytes(32))


def _copied_key(scene: Scene, answer: bytes) -> bytes:
    of_peer = Advertise.from_bytes(scene.answers["advertise", scene.peer], scene.parameters, scene.peer)
    return _changed_advert(scene, answer, of_peer.mask)


def _impostor(scene: Scene, answer: bytes) -> bytes:
    advert = Advertise.from_bytes(answer, scene.parameters, scene.liar)
    return signed(scene, advert, scene.liar, Identity.new()).to_bytes(scene.parameters, scene.liar)


def _repeated_id(scene: Scene, stage: str) -> None:
    if stage == "advertise":
        advert = signed(scene, forged(scene), scene.peer, Identity.new())
        scene.deliver(scene.peer, advert.to_bytes(scene.parameters, scene.peer), lie=True)


def _self_share(scene: Scene, answer: bytes) -> bytes:
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    sealed = dict(shares.sealed)
    sealed[scene.liar] = next(iter(sealed.values()))
    return replace(shares, sealed=sealed).to_bytes(scene.parameters, scene.liar)


def _changed_choice(scene: Scene, answer: bytes) -> bytes:
    """It deals to another client than one of those it chose when it advertised."""
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    sealed = dict(shares.sealed)
    stranger = next(one for one in scene.parameters.clients if one not in sealed and one != scene.liar)
    sealed[stranger] = sealed.pop(next(iter(sealed)))
    return replace(shares, sealed=sealed).to_bytes(scene.parameters, scene.liar)


def _wrong_commitment(scene: Scene, answer: bytes) -> bytes:
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    return replace(shares, commitment=Secret.new().reveal()).to_bytes(scene.parameters, scene.liar)


def _wrong_shares(scene: Scene, answer: bytes) -> bytes:
    opened = Opened.from_bytes(answer, scene.parameters, scene.liar)
    seeds, keys = (
        {owner: bytes([share[0] ^ 1]) + share[1:] for owner, share in shares.items()}
        for shares in (opened.seeds, opened.keys)
    )
    return Opened(seeds, keys).to_bytes(scene.parameters, scene.liar)


def _done_without(scene: Scene) -> str:
    if scene.server.stage != "done" or scene.liar in scene.server.survivors:
        return ""
    return f"client {scene.liar} dealt no shares, and the sum is that of the {len(scene.server.survivors)} others"


def _replay(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    if client != scene.liar:
        scene.deliver(client, answer)
        return
    if scene.kept is None:
        scene.kept = earlier(scene)
    scene.deliver(client, scene.kept.answers[stage, client], lie=True)
    scene.deliver(client, answer)
    scene.deliver(client, answer, lie=True)


CLIENTS = (
    Attack(
        "small-order",
        "A client advertises a mask key of small order, with which anybody agrees on the same secret.",
        "server",
        "advertise",
        Tampering,
        exact=True,
        send=refused("advertise", _small_order),
    ),
    Attack(
        "copied-key",
        "A client advertises the mask key of another client as its own.",
        "server",
        "advertise",
        Tampering,
        exact=True,
        send=refused("advertise", _copied_key),
    ),
    Attack(
        "repeated-id",
        "Somebody advertises keys of its own under the number of a client that has advertised.",
        "server",
        "advertise",
        MessageError,
        exact=True,
        closing=_repeated_id,
    ),
    Attack(
        "impostor",
        "A client signs its keys with an identity that is not the registered one.",
        "server",
        "advertise",
        Tampering,
        active=True,
        exact=True,
        send=refused("advertise", _impostor),
    ),
    Attack(
        "self-share",
        "A client deals a share to itself.",
        "server",
        "share",
        MessageError,
        exact=True,
        send=refused("share", _self_share),
    ),
    Attack(
        "changed-choice",
        "A client deals its shares to others than it chose when it advertised.",
        "server",
        "share",
        MessageError,
        active=True,
        ring=True,
        exact=True,
        send=refused("share", _changed_choice),
    ),
    Attack(
        "wrong-commitment",
        "A client commits itself to another seed than the one it shares.",
        "server",
        "unmask",
        Tampering,
        send=found_out("share", _wrong_commitment),
    ),
    Attack(
        "wrong-share",
        "A client opens a wrong share of everybody; it is named, and the sum comes out all the same.",
        "server",
        "unmask",
        Tampering,
        exact=True,
        send=found_out("unmask", _wrong_shares),
    ),
    Attack(
        "early-drop",
        "A client vanishes before its shares are out; the sum of the others comes out all the same.",
        "server",
        "share",
        ProtocolError,
        exact=True,
        send=withheld,
        outcome=_done_without,
    ),
    Attack(
        "replay",
        "In every stage a message of an earlier session comes first, and the right one comes twice.",
        "server",
        "",
        MessageError,
        exact=True,
        send=_replay,
    ),
)
