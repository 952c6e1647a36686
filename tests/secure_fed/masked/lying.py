"""A server that sends arbitrary messages to clients of masked sums, one session at a time, and the clients' answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from privacy.entropy import Stream, SystemEntropy
from protocols.errors import Aborted, ParameterError
from protocols.parameters import Parameters
from protocols.server import Server
from secure_fed.federation import Federation
from secure_fed.rounds.transport import ContributorList, Request, Stage
from secure_fed.tensors.sums import PlainSum
from tests.secure_fed.masked.wide_toys import LR

Lie = Callable[[Parameters], Parameters]


@dataclass
class Noting:
    """The operating system's entropy, with a record of the labels of all streams requested."""

    labels: list[tuple[str | int, ...]] = field(default_factory=list)

    @property
    def private(self) -> bool:
        return True

    def stream(self, *label: str | int) -> Stream:
        self.labels.append(label)
        return SystemEntropy().stream(*label)

    def drawn(self, what: str) -> int:
        return sum(label[0] == what for label in self.labels)


@dataclass
class Watched:
    """The trainings of a federation's clients, and the randomness that they drew."""

    entropy: Noting = field(default_factory=Noting)
    trained: list[tuple[int, int]] = field(default_factory=list)  # (round, client)


def watch(built: Federation) -> Watched:
    seen = Watched()
    for member in built.assembly.masks.clients:  # type: ignore[union-attr]
        member._entropy = seen.entropy
        handle = member.client.handle

        def handled(request: Any, handle: Any = handle, index: int = member.client.index) -> Any:
            seen.trained.append((request.round, index))
            return handle(request)

        member.client.handle = handled  # type: ignore[method-assign]
    return seen


@dataclass
class Heard:
    """A session's outcome. refused: by client, the stage, error type and sentence. stage: the last stage reached."""

    refused: dict[int, tuple[str, type[Exception], str]] = field(default_factory=dict)
    stage: str = ""
    machine: Any = None

    @property
    def alike(self) -> bool:
        """Whether all refusals were at the same stage, with the same error and sentence."""
        return len(set(self.refused.values())) == 1


def request_of(
    built: Federation, round_: int = 0, which: int = 0, first: Request | None = None, lr: float = LR
) -> Request:
    """An honest server's request in pass number `which` of a round, with zero means of earlier passes.

    first: the round's first request.
    """
    state = replace(built.assembly.initial, round=round_)
    plan = built.assembly.server.plan(state)
    means = {name: PlainSum(built.assembly.server.layout(state, name)).total() for name in plan.passes[:which]}
    return built.assembly.server.request(state, plan, plan.passes[which], lr, means, first.digest if first else "")


def session(
    built: Federation,
    request: Request,
    *,
    number: int = 0,
    lie: Lie = lambda parameters: parameters,
    lies_at: Callable[[str], bool] = lambda stage: True,
    asked: Callable[[int], bool] = lambda client: True,
    upto: str = "done",
    clients: Sequence[int] | None = None,
    contributors: ContributorList | None = None,
    lost: int | None = None,
) -> Heard:
    """One session, by default over all clients, up to and including stage `upto`, or until a client refuses.

    lie: the change to the session's parameters, in the stages that `lies_at` selects. asked: the clients that receive a request
    to contribute; others are to send zeros. lost: a client whose masked vector does not arrive.
    """
    terms = built.assembly.masks.sums.terms  # type: ignore[union-attr]
    invited = range(len(built.assembly.clients)) if clients is None else clients
    state = replace(built.assembly.initial, round=request.round)
    names = built.assembly.server.plan(state).passes
    layout = built.assembly.server.layout(state, request.pass_name if request.pass_name in names else names[0])
    encoding = terms.encoding(layout.size, built.assembly.initial.clip_norm)
    digest = contributors.layout if contributors else bytes.fromhex(request.digest)
    honest = terms.parameters(number, invited, digest, encoding.length, encoding.largest)
    told = {True: lie(honest), False: honest}
    known = {client: terms.registry.public[client] for client in invited} if terms.registry else {}
    heard = Heard(machine=_machine(told[lies_at("advertise")], honest, known))
    messages: Any = dict.fromkeys(invited, b"")
    while heard.machine.stage != "done" and not heard.refused and heard.stage != upto:
        heard.stage = heard.machine.stage
        for client, message in messages.items():
            if client == lost and heard.stage == "mask":
                continue
            given = request if heard.stage == "mask" and asked(client) else None
            declared = contributors if heard.stage == "mask" else None
            _ask(
                built,
                client,
                Stage(request.round, heard.stage, told[lies_at(heard.stage)], message, given, declared),
                heard,
            )
        if not heard.refused and heard.stage != upto:
            messages = heard.machine.close()
    return heard


def _machine(told: Parameters, honest: Parameters, identities: Mapping[int, bytes]) -> Server:
    """The protocol's server, with the honest parameters if the ones sent to clients are invalid for a server."""
    try:
        return Server(told, identities=identities)
    except ParameterError:
        return Server(honest, identities=identities)


def _ask(built: Federation, client: int, stage: Stage, heard: Heard) -> None:
    try:
        answer = built.assembly.masks.clients[client].handle(stage)  # type: ignore[union-attr]
    except Exception as error:  # a server would see any error
        heard.refused[client] = (stage.name, type(error), getattr(error, "what", str(error)))
        return
    if answer is None:
        heard.refused[client] = (stage.name, Aborted, "")
    else:
        heard.machine.receive(client, answer.message)
