"""Secure aggregation: a server learns the sum of its clients' integer vectors, and nothing else about the vectors.

State machines without input or output: bytes in, bytes out. A whole session, with everybody in one process:

    def end(answers):  # ends a stage: takes every client's answer, returns the next message for each client
        for client, answer in answers.items():
            server.receive(client, answer)
        return server.close().items()

    server, clients = Server(parameters), {i: Client(parameters, i, policy) for i in parameters.clients}
    roster = end({i: client.advertise() for i, client in clients.items()})
    mail = end({i: clients[i].share(message) for i, message in roster})
    survivors = end({i: clients[i].mask(message, vectors[i]) for i, message in mail})
    end({i: clients[i].unmask(message) for i, message in survivors})
    total = server.total()

A client that does not answer leaves the session, at any stage; once its vector has arrived, the vector stays in the sum. Active
sessions have a step `confirm` before `unmask`. The package knows nothing of models: vectors are unsigned words, and
`FixedPoint` makes them of real numbers.

`parameters` and `thresholds` say which sessions are safe. `keys`, `masking` and `sharing` are the cryptography, `wire` the
messages, `graph` and `roster` who shares secrets with whom. `client`, with its `record` on disk, and `server` are the two
sides.
`workers`, and `simulate` with `scene` and `lies`, are for simulations, and no part of the protocol.
"""

from protocols.client import Client
from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, RangeError, Spent, Tampering
from protocols.keys import Identity, registry_digest
from protocols.masking import FixedPoint
from protocols.parameters import Parameters, Policy, stages
from protocols.record import InMemory, OnDisk, Sessions
from protocols.server import Server
from protocols.thresholds import Choice, choose

__all__ = [
    "Aborted",
    "Choice",
    "Client",
    "FixedPoint",
    "Identity",
    "InMemory",
    "MessageError",
    "OnDisk",
    "ParameterError",
    "Parameters",
    "Policy",
    "ProtocolError",
    "RangeError",
    "Server",
    "Sessions",
    "Spent",
    "Tampering",
    "choose",
    "registry_digest",
    "stages",
]
