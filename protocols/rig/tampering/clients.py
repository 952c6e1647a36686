"""Keys, shares and messages of a client that lies or drops out. The server notices, or recovers the sum."""

from __future__ import annotations

from dataclasses import replace

from protocols.errors import MessageError, ProtocolError, Tampering
from protocols.keys import Identity, Secret
from protocols.messages import Advertise, Opened, Shares
from protocols.rig.attack import Attack, lie
from protocols.rig.scene import Scene
from protocols.rig.tampering.means import earlier, forged, sent, signed, withheld

CLIENTS: list[Attack] = []


def _changed_advert(scene: Scene, answer: bytes, mask: bytes) -> bytes:
    advert = replace(Advertise.from_bytes(answer, scene.parameters, scene.liar), mask=mask)
    return signed(scene, advert, scene.liar, scene.identities.get(scene.liar)).to_bytes(scene.parameters, scene.liar)


@lie(CLIENTS, "small-order", "server", "advertise", Tampering, "send", sent("advertise"), exact=True)
def _small_order(scene: Scene, answer: bytes) -> bytes:
    """A client advertises a mask key of small order, with which anybody agrees on the same secret."""
    return _changed_advert(scene, answer, bytes(32))


@lie(CLIENTS, "copied-key", "server", "advertise", Tampering, "send", sent("advertise"), exact=True)
def _copied_key(scene: Scene, answer: bytes) -> bytes:
    """A client advertises the mask key of another client as its own."""
    of_peer = Advertise.from_bytes(scene.answers["advertise", scene.peer], scene.parameters, scene.peer)
    return _changed_advert(scene, answer, of_peer.mask)


@lie(CLIENTS, "repeated-id", "server", "advertise", MessageError, "closing", exact=True)
def _repeated_id(scene: Scene, stage: str) -> None:
    """Somebody advertises keys of its own under the number of a client that has advertised."""
    if stage == "advertise":
        advert = signed(scene, forged(scene), scene.peer, Identity.new())
        scene.deliver(scene.peer, advert.to_bytes(scene.parameters, scene.peer), lie=True)


@lie(CLIENTS, "impostor", "server", "advertise", Tampering, "send", sent("advertise"), active=True, exact=True)
def _impostor(scene: Scene, answer: bytes) -> bytes:
    """A client signs its keys with an identity that is not the registered one."""
    advert = Advertise.from_bytes(answer, scene.parameters, scene.liar)
    return signed(scene, advert, scene.liar, Identity.new()).to_bytes(scene.parameters, scene.liar)


@lie(CLIENTS, "self-share", "server", "share", MessageError, "send", sent("share"), exact=True)
def _self_share(scene: Scene, answer: bytes) -> bytes:
    """A client deals a share to itself."""
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    sealed = dict(shares.sealed)
    sealed[scene.liar] = next(iter(sealed.values()))
    return replace(shares, sealed=sealed).to_bytes(scene.parameters, scene.liar)


@lie(
    CLIENTS,
    "changed-choice",
    "server",
    "share",
    MessageError,
    "send",
    sent("share"),
    active=True,
    ring=True,
    exact=True,
)
def _changed_choice(scene: Scene, answer: bytes) -> bytes:
    """A client deals its shares to others than it chose when it advertised."""
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    sealed = dict(shares.sealed)
    stranger = next(one for one in scene.parameters.clients if one not in sealed and one != scene.liar)
    sealed[stranger] = sealed.pop(next(iter(sealed)))
    return replace(shares, sealed=sealed).to_bytes(scene.parameters, scene.liar)


@lie(CLIENTS, "wrong-commitment", "server", "unmask", Tampering, "send", sent("share", at_once=False))
def _wrong_commitment(scene: Scene, answer: bytes) -> bytes:
    """A client commits itself to another seed than the one it shares."""
    shares = Shares.from_bytes(answer, scene.parameters, scene.liar)
    return replace(shares, commitment=Secret.new().reveal()).to_bytes(scene.parameters, scene.liar)


@lie(CLIENTS, "wrong-share", "server", "unmask", Tampering, "send", sent("unmask", at_once=False), exact=True)
def _wrong_shares(scene: Scene, answer: bytes) -> bytes:
    """A client opens a wrong share of everybody; it is named, and the sum comes out all the same."""
    opened = Opened.from_bytes(answer, scene.parameters, scene.liar)
    seeds, keys = (
        {owner: bytes([share[0] ^ 1]) + share[1:] for owner, share in shares.items()}
        for shares in (opened.seeds, opened.keys)
    )
    return Opened(seeds, keys).to_bytes(scene.parameters, scene.liar)


@lie(CLIENTS, "early-drop", "server", "share", ProtocolError, "outcome", exact=True, send=withheld)
def _done_without(scene: Scene) -> str:
    """A client vanishes before its shares are out; the sum of the others comes out all the same."""
    if scene.server.stage != "done" or scene.liar in scene.server.survivors:
        return ""
    return f"client {scene.liar} dealt no shares, and the sum is over the {len(scene.server.survivors)} others"


@lie(CLIENTS, "replay", "server", "", MessageError, "send", exact=True)
def _replay(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """In every stage a message of an earlier session comes first, and the right one comes twice."""
    if client != scene.liar:
        scene.deliver(client, answer)
        return
    if scene.kept is None:
        scene.kept = earlier(scene)
    scene.deliver(client, scene.kept.answers[stage, client], lie=True)
    scene.deliver(client, answer)
    scene.deliver(client, answer, lie=True)
