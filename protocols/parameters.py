"""What a session is: its parameters, on which all sides agree, and the policy by which one client judges them.

`Parameters` come from the server, or from the party that sets up the run. Every side checks that they are usable, and every
message is bound to their digest. A `Policy` is a client's own: the weakest session in which it takes part. No server can lower
it.

With h holders of each client's shares, c of them corrupt, and t shares to rebuild a secret:

    passive    c < t           the corrupt holders alone rebuild nothing
    active     2 t > h + c     two different lists of survivors would need t answers each. Every corrupt holder can give two, an
    honest holder gives one: h + c in all. So both secrets of one client are never rebuilt.

Where n clients choose their neighbours (`graph.ChosenGraph`), C of them corrupt, a list is opened after `survivors` signatures:

    2 survivors > n + C        two different lists would need `survivors` signatures each, and get n + C at most in all

Parameters must satisfy these bounds for c = C = 0, and a policy demands them for the client's own c and C.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TypeGuard

from protocols.errors import ParameterError
from protocols.keys import registry_digest

PROTOCOL = 3
_TITLE = b"secure-fed/session"
SERVER = 2**32 - 1  # the server's number; clients have smaller ones
WORDS = (32, 64)
SMALL, LARGE = 2**32 - 1, 2**64 - 1  # the largest numbers that the session's encoding can represent


@dataclass(frozen=True)
class Parameters:
    """Everything that both sides must agree on. ParameterError, in one sentence, if no session is possible.

    `clients` are the invited clients; fewer may take part. The neighbours of each, in the graph on the clients that take part,
    hold its shares: `neighbours` of them, or all others where there are no more. No sum of fewer than `survivors` clients is
    released.

    In an active session that is not complete every client chooses its neighbours itself (`graph.ChosenGraph`).
    """

    run: str
    round: int
    layout: bytes  # 32: digest of the meaning of the coordinates
    length: int  # coordinates of a vector
    bits: int  # of one coordinate
    clients: tuple[int, ...]  # ascending
    neighbours: int
    threshold: int
    survivors: int
    active: bool
    bound: int = 0  # largest magnitude of one encoded coordinate; 0: the size of the sum is not checked
    registry: bytes = bytes(32)  # digest of the invited clients' identities; zeros in a passive session
    partners: int = 0  # where clients choose: the least survivors of each one's first `masked` choices; else 0

    def __post_init__(self) -> None:
        for sentence in self._violations():
            raise ParameterError(sentence)

    @cached_property
    def session(self) -> bytes:
        """(32,) digest of everything: SHA-256 of `to_bytes`."""
        return hashlib.sha256(self.to_bytes()).digest()

    def __hash__(self) -> int:
        """By the session, which is computed once: parameters are the keys of many caches."""
        return hash(self.session)

    def to_bytes(self) -> bytes:
        """The protocol's version and every field, numbers little-endian:

            "secure-fed/session" | version u32 | bytes of run u32 | run | round u64 | layout 32 | length u32 | bits u32
                | number of clients u32 | clients u32 each | neighbours u32 | threshold u32 | survivors u32
                | active u32 | partners u32 | bound u64 | registry 32

        Every part is of fixed size or preceded by its size, so two different sessions never have the same encoding.
        """
        run = self.run.encode()
        numbers = (self.neighbours, self.threshold, self.survivors, int(self.active), self.partners)
        parts = (
            _TITLE,
            struct.pack("<II", PROTOCOL, len(run)) + run,
            struct.pack("<Q", self.round) + self.layout + struct.pack("<II", self.length, self.bits),
            struct.pack(f"<I{len(self.clients)}I", len(self.clients), *self.clients),
            struct.pack("<5IQ", *numbers, self.bound) + self.registry,
        )
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, data: bytes) -> Parameters:
        """The inverse of `to_bytes`; ParameterError for anything but the bytes of usable parameters."""
        try:
            view, at = memoryview(data), len(_TITLE)
            _, size = struct.unpack_from("<II", view, at)
            run = bytes(view[at + 8 : at + 8 + size]).decode()
            at += 8 + size
            (round_,) = struct.unpack_from("<Q", view, at)
            layout = bytes(view[at + 8 : at + 40])
            length, bits, count = struct.unpack_from("<III", view, at + 40)
            at += 52
            if 4 * count > len(data) - at:  # before a table of this size is allocated
                raise ParameterError(f"the session's parameters cannot be read: they lack {count} clients")
            clients = struct.unpack_from(f"<{count}I", view, at)
            neighbours, threshold, survivors, active, partners, bound = struct.unpack_from("<5IQ", view, at + 4 * count)
            registry = bytes(view[at + 4 * count + 28 :])
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ParameterError(f"the session's parameters cannot be read: {error}") from error
        numbers = (neighbours, threshold, survivors, bool(active), bound)
        found = cls(run, round_, layout, length, bits, clients, *numbers, registry, partners)
        if found.to_bytes() != data:
            raise ParameterError("the session's parameters cannot be read: they are not of this version, or too long")
        return found

    @property
    def complete(self) -> bool:
        """Whether every client is a neighbour of every other, however many take part."""
        return self.neighbours >= len(self.clients) - 1

    @property
    def holders(self) -> int:
        """h: the largest number of holders of one client's shares."""
        return min(self.neighbours, len(self.clients) - 1)

    @property
    def chosen(self) -> bool:
        """Whether every client chooses its neighbours itself; otherwise a lying server could surround it with corrupt ones."""
        return self.active and not self.complete

    @property
    def masked(self) -> int:
        """m: where clients choose, the number of first choices with which a client shares a mask."""
        return self.neighbours // 2

    @property
    def signers(self) -> int:
        """The number of clients that must sign a list of survivors in an active session."""
        return self.survivors if self.chosen else self.threshold + 1

    def _violations(self) -> Iterator[str]:
        """A sentence for each fault. The first is the one to report: later checks rely on the fields before them."""
        if not isinstance(self.run, str) or not self.run or not _fits_utf8(self.run):
            yield f"run is {self.run!r:.80}: name the run in text of 1 to {SMALL} bytes of UTF-8"
        if not is_whole(self.round, 0, LARGE):
            yield f"round is {self.round!r:.40}: number rounds from 0 to 2^64 - 1"
        if not _is_digest(self.layout):
            yield "layout is not 32 bytes: give the SHA-256 of what the coordinates mean"
        if not is_whole(self.length, 1, SMALL):
            yield f"length is {self.length!r:.40}: choose 1 to 2^32 - 1 coordinates"
        if not is_whole(self.bits, 0, SMALL) or self.bits not in WORDS:
            yield f"bits is {self.bits!r:.40}: a coordinate has 32 or 64"

        if not isinstance(self.clients, tuple) or not 2 <= len(self.clients) < SERVER:
            yield "clients is not a tuple of at least two: a sum over fewer hides nobody"
        for client in self.clients:
            if not is_whole(client, 0, SERVER - 1):
                yield f"clients holds {client!r:.40}: number clients from 0 to 2^32 - 2"
        for before, after in pairwise(self.clients):
            if before >= after:
                yield f"clients holds {after} after {before}: list each once, in ascending order"
        if not isinstance(self.active, bool):
            yield f"active is {self.active!r:.40}: choose True or False"
        if not _is_digest(self.registry):
            yield "registry is not 32 bytes: give the digest of the identities"
        if self.active != any(self.registry):
            yield "registry must be the digest of the identities in an active session, and zeros in a passive session"

        if not is_whole(self.neighbours, 1, SMALL):
            yield f"neighbours is {self.neighbours!r:.40}: it is a whole number from 1 on"
        if not self.complete and self.neighbours % 2:
            yield f"neighbours is {self.neighbours} on a graph that is not complete: it is even, or at least clients - 1"
        if not is_whole(self.threshold, 1, self.holders):
            yield (
                f"threshold is {self.threshold!r:.40} and {self.holders} hold shares of a client: "
                f"choose a threshold from 1 to {self.holders}"
            )
        if self.active and 2 * self.threshold <= self.holders:
            yield (
                f"threshold is {self.threshold}, and {self.holders} holders could confirm two lists of survivors: "
                f"an active session needs a threshold of at least {self.holders // 2 + 1}"
            )
        if not is_whole(self.survivors, 2, len(self.clients)):
            yield f"survivors is {self.survivors!r:.40}: choose the least size of a sum from 2 to {len(self.clients)}"
        if not self.chosen and self.partners != 0:
            yield f"partners is {self.partners!r:.40}: it is 0 where clients do not choose their neighbours"
        if self.chosen and not is_whole(self.partners, 1, self.masked):
            yield (
                f"partners is {self.partners!r:.40}: choose from 1 to {self.masked}, the choices of a client that share a mask"
            )
        if self.chosen and 2 * self.survivors <= len(self.clients):
            yield (
                f"survivors is {self.survivors}, and that many of {len(self.clients)} clients could sign each of two lists of "
                f"survivors: choose at least {len(self.clients) // 2 + 1}"
            )
        most = (2 ** (self.bits - 1) - 1) // len(self.clients)
        if not is_whole(self.bound, 0, most):
            yield f"bound is {self.bound!r:.40}: {self.bits} bits hold sums of {len(self.clients)} up to a bound of {most}"


def stages(parameters: Parameters) -> tuple[str, ...]:
    """The names of a session's stages, in order."""
    agreed = ("consistency",) if parameters.active else ()
    return ("advertise", "share", "mask", *agreed, "unmask")


@dataclass(frozen=True)
class Policy:
    """A client's requirements on a session: the least values of parameters, and the most corrupt clients that it assumes."""

    threshold: int
    survivors: int
    corrupt: int = 0  # most among the holders of one client's shares; on a complete graph, among all clients
    window: int = 0  # most corrupt in any k / 2 consecutive places of a ring
    active: bool = False  # True: passive sessions are refused
    identities: Mapping[int, bytes] = field(default_factory=dict)  # registered out of band
    clients: int = 2  # least number invited
    neighbours: int | None = None  # exactly this number, where corrupt and window were computed for it
    partners: int = 0
    colluding: int = 0  # most corrupt among all invited clients

    def __post_init__(self) -> None:
        least = {"threshold": 1, "survivors": 2, "corrupt": 0, "window": 0, "clients": 2, "partners": 0, "colluding": 0}
        for name, value in least.items():
            if not is_whole(getattr(self, name), value, SMALL):
                raise ParameterError(f"{name} of the policy is {getattr(self, name)!r:.40}: it is {value} or more")

    def check(self, parameters: Parameters) -> None:
        """ParameterError unless this client may take part in such a session."""
        for sentence in self._violations(parameters):
            raise ParameterError(sentence, protected="nothing was sent")

    def _violations(self, parameters: Parameters) -> Iterator[str]:
        """A sentence for each demand that the session does not meet."""
        given = {
            "clients": len(parameters.clients),
            "threshold": parameters.threshold,
            "survivors": parameters.survivors,
        }
        for name, value in given.items():
            if value < getattr(self, name):
                yield f"the session's {name} is {value}, and this client's policy needs at least {getattr(self, name)}"
        colluding = max(self.corrupt, self.colluding)
        if parameters.survivors < colluding + 2:
            yield (
                f"the session releases sums of {parameters.survivors}, and with {colluding} corrupt among them fewer than "
                f"two would be honest: raise survivors to at least {colluding + 2}"
            )

        if parameters.active and self.corrupt and self.neighbours is None:
            yield (
                "the policy expects corrupt clients but sets no number of neighbours: set neighbours, or a server "
                "could choose a graph with more corrupt neighbours"
            )
        if self.neighbours not in (None, parameters.neighbours):
            yield f"the session has {parameters.neighbours} neighbours, and this client's policy is for {self.neighbours}"
        holders = parameters.holders
        least = (holders + self.corrupt) // 2 + 1 if parameters.active else self.corrupt + 1
        if parameters.threshold < least:
            kind = "an active" if parameters.active else "a passive"
            yield (
                f"the session's threshold is {parameters.threshold}; with {self.corrupt} corrupt among {holders} holders "
                f"{kind} session needs at least {least}: raise threshold"
            )
        if parameters.chosen:
            if parameters.partners < max(self.partners, 1):
                yield f"the session's partners is {parameters.partners}, and this client's policy needs {self.partners}"
            if self.corrupt and not self.partners:
                yield "the policy expects corrupt holders but sets no partners: set partners as `choose` computes it"
            clients = len(parameters.clients)
            if 2 * parameters.survivors <= clients + colluding:
                yield (
                    f"the session releases sums of {parameters.survivors}, and with {colluding} corrupt of {clients} two lists "
                    f"of survivors could be signed: raise survivors to at least {(clients + colluding) // 2 + 1}"
                )
        elif not parameters.complete:
            if self.corrupt and not self.window:
                yield (
                    f"the policy expects {self.corrupt} corrupt holders but none in a window of the ring: set window, "
                    f"to {self.corrupt} if in doubt"
                )
            if self.window >= parameters.neighbours // 2:
                yield (
                    f"the policy allows {self.window} corrupt in {parameters.neighbours // 2} consecutive places of the ring, "
                    "which could cut it anywhere: raise neighbours"
                )

        if not parameters.active and self.active:
            yield "the session is passive, and this client's policy needs an active session"
        if parameters.active and registry_digest(self.identities, parameters.clients) != parameters.registry:
            yield "the session's identities differ from those registered at this client"


def is_whole(value: object, least: int, most: int) -> TypeGuard[int]:
    """Whether it is an integer, not a bool, in this range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_digest(value: object) -> bool:
    return isinstance(value, bytes) and len(value) == 32


def _fits_utf8(text: str) -> bool:
    try:
        return len(text.encode()) <= SMALL
    except UnicodeEncodeError:
        return False
