"""Tools of liars: replaced messages, forged advertisements, an earlier session."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from protocols.keys import AgreementKey, Identity, registry_digest
from protocols.messages import SIGNATURE, Advertise, Survivors, seeds
from protocols.policy import Policy
from protocols.rig.play import play
from protocols.rig.scene import SERVER, Inbox, Scene
from protocols.roster import near

Change = Callable[[Scene, bytes], bytes]
Tell = Callable[[Scene, str, Inbox], Inbox]
Send = Callable[[Scene, str, int, bytes], None]

_BYSTANDERS = 2  # clients in an earlier session beside the three roles


def sent(stage: str, *, at_once: bool = True) -> Callable[[Change], Send]:
    """In this stage the liar sends a changed message. The server must refuse it at once, or notice it by the end."""

    def made(change: Change) -> Send:
        def send(scene: Scene, now: str, client: int, answer: bytes) -> None:
            lies = (now, client) == (stage, scene.liar)
            if lies and not at_once:
                scene.expect(SERVER)
            scene.deliver(client, change(scene, answer) if lies else answer, lie=lies and at_once)

        return send

    return made


def told(stage: str) -> Callable[[Callable[[Scene, Inbox], Inbox]], Tell]:
    """In this stage, or where the "roster" or the "survivors" are shown, the server sends changed messages."""

    def made(change: Callable[[Scene, Inbox], Inbox]) -> Tell:
        return lambda scene, now, inbox: change(scene, inbox) if now == scene.stage_of(stage) else inbox

    return made


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
    complete = not scene.parameters.chosen
    parameters = replace(
        scene.parameters,
        round=scene.parameters.round - 1,
        clients=invited,
        neighbours=len(invited) - 1 if complete else 2,
        threshold=len(invited) - 1 if complete else 2,
        survivors=2 if complete else len(invited),
        partners=0 if complete else 1,
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


def withheld(scene: Scene, stage: str, client: int, answer: bytes) -> None:
    """The liar vanishes before its shares are out."""
    if (stage, client) != ("share", scene.liar):
        scene.deliver(client, answer)
