"""A session played from its first stage to its last, with at most one attack."""

from __future__ import annotations

import time

from protocols import roster
from protocols.client import Client
from protocols.errors import ProtocolError, Tampering
from protocols.keys import verify
from protocols.opening import listed, signers
from protocols.parameters import stages
from protocols.rig.attack import HONEST, Attack
from protocols.rig.scene import PARAMETERS, SERVER, Refusal, Scene, Tally
from protocols.server import Server


def play(scene: Scene, attack: Attack = HONEST) -> None:
    """Play all stages. A `ProtocolError` of the server ends the session and is kept as `scene.aborted`."""
    scene.lies_in = attack.stage
    _join(scene, attack)
    try:
        for stage in stages(scene.parameters):
            _stage(scene, attack, stage)
    except ProtocolError as error:
        scene.aborted = str(error)
        scene.refusals.append(Refusal(SERVER, scene.stage, error))
    else:
        for one in sorted(scene.server.suspects):
            scene.refusals.append(Refusal(SERVER, scene.stage, Tampering(f"client {one} opened wrong shares")))


def _join(scene: Scene, attack: Attack) -> None:
    """Invite every client to the session, with the parameters that the attack proposes."""
    public = {client: identity.public for client, identity in scene.identities.items()}
    invited = scene.parameters.clients
    try:
        proposed = attack.propose(scene.parameters) if attack.propose else scene.parameters
    except ProtocolError as error:  # unusable parameters: nobody can read them
        proposed = scene.parameters
        scene.refusals += [Refusal(client, PARAMETERS, error) for client in invited]
        scene.expected.update((client, PARAMETERS) for client in invited)
        invited = ()
    for client in invited:
        if proposed is not scene.parameters:
            scene.expect(client, PARAMETERS)
        try:
            scene.clients[client] = Client(proposed, client, scene.policy, identity=scene.identities.get(client))
        except ProtocolError as error:
            scene.refusals.append(Refusal(client, PARAMETERS, error))
    try:
        scene.server = Server(proposed, identities=public)
    except ProtocolError:  # identities that the liar invented are not in the registry: use the true parameters
        scene.server = Server(scene.parameters, identities=public)
    scene.parameters = scene.server.parameters
    scene.inbox = dict.fromkeys(scene.clients, proposed.to_bytes())


def _stage(scene: Scene, attack: Attack, stage: str) -> None:
    scene.stage = stage
    scene.tallies.append(Tally(stage))
    scene.gone.update(scene.leaving.get(stage, ()))
    inbox = attack.tell(scene, stage, dict(scene.inbox)) if attack.tell else scene.inbox
    if stage == scene.stage_of(attack.stage):
        for client, message in inbox.items():
            if message is not scene.inbox.get(client) and client not in scene.gone:
                scene.expect(client)
    _forget_shared_work()
    for done, (client, message) in enumerate(inbox.items(), 1):
        _turn(scene, attack, client, message)
        if scene.progress is not None:
            scene.progress(stage, done, len(inbox))
    if attack.closing:
        attack.closing(scene, stage)
    start = time.perf_counter()
    try:
        scene.inbox = scene.server.close()
    finally:
        scene.tallies[-1].server_seconds += time.perf_counter() - start


def _turn(scene: Scene, attack: Attack, client: int, message: bytes) -> None:
    """One client reads its message and answers, and the attack passes the answer on to the server."""
    stage, tally = scene.stage, scene.tallies[-1]
    tally.down.append(len(message))
    if client in scene.gone:
        return
    answer = scene.act(scene.clients[client], stage, message)
    if answer is None:
        scene.gone.add(client)
        return
    tally.answered += 1
    tally.up.append(len(answer))
    if client in (scene.peer, scene.victim, scene.liar):
        scene.messages[stage, client], scene.answers[stage, client] = message, answer
    if attack.send:
        attack.send(scene, stage, client, answer)
    else:
        scene.deliver(client, answer)


def _forget_shared_work() -> None:
    """Empty the caches of work that all clients repeat on one message, so that the first client of each stage does it anew.

    The longest time in a stage is then the time of a client on its own machine.
    """
    of_rosters = (roster.judged, roster._chosen, roster._graph, roster.chosen_by)
    for remembered in (*of_rosters, verify, listed, signers):
        remembered.cache_clear()
