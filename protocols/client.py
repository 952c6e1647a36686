"""A client of one session: bytes in, bytes out, no input or output of its own.

Its steps come in order, each once; anything else is a `MessageError`. After any error the client is finished: it drops its
secrets and answers nothing more. It judges the server's messages by its own `Policy` and its own state.

It sends, in this order: public keys; shares sealed to neighbours; its vector under its masks; and at most one share of each
neighbour, once per session, after `Sessions.claim` has recorded this durably.

The list of survivors determines which of two secrets is opened for each neighbour: the seed of a survivor, or the mask key of a
client that dropped out. A server that obtained both secrets of one client would read its vector, and a server that could invent
lists would cut the sum into small sums. So before it opens any share, the client refuses a list

- without itself, or with a client that is not on the roster (in an active session: that has not dealt its shares);
- shorter than `survivors`, or with fewer than `threshold` holders of its own shares;
- with a neighbour that never dealt shares, so never completed the stage before the masks;
- on a ring: whose survivors are no longer certainly connected, given its `window`, since each part would have its own sum.

In an active session every client signs, with its vector, the list of the clients that have dealt shares, which shows with whom
it masked; and it signs only one list of survivors together with that list, ever (`Sessions`). A client refuses a list of
survivors

- with a client near it that did not sign the same list of the clients that have dealt (`roster.near`: whose shares it holds, or
  with whom it shares a mask), so that every counted edge is a mask that both sides have added;
- where clients choose: with fewer than `partners` of the first choices of a client whose shares it holds, or of its own;
- without the signatures of `signers` clients, among them `threshold` holders of its own shares.

On a complete graph 2 threshold > h + c, and where clients choose 2 survivors > n + C, so honest clients open shares for only
one pair of lists. On a complete graph all honest survivors share masks with each other, so no part of them has its own sum; for
sessions where clients choose, `graph.ChosenGraph` has the proof.

A client runs on its own machine (`OneClient`), or many run in a simulation: in this process (`Here`), or in several
(`workers.Workers`).
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Protocol

import numpy as np

from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, RangeError, Tampering
from protocols.graph import ChosenGraph, Topology
from protocols.keys import AgreementKey, Agreements, Alone, Identity, Secret, commitment, seal, unseal
from protocols.masking import Words, add_masks
from protocols.parameters import Parameters, Policy
from protocols.record import InMemory, Sessions
from protocols.roster import Agreed, Identities, chosen_by, dealers_graph, judged, near, roster_graph, signs, states
from protocols.sharing import SHARE, split_each
from protocols.wire import Advertise, Confirm, Confirmations, Delivery, Masked, Opened, Shares, Survivors


@dataclass(frozen=True)
class Keys:
    """A client's secrets, fresh for every session, from the operating system."""

    channel: AgreementKey
    mask: AgreementKey
    seed: Secret  # of the self mask
    choice: Secret  # the seed of its choice of neighbours, secret until it is advertised

    @classmethod
    def new(cls) -> Keys:
        return cls(AgreementKey.new(), AgreementKey.new(), Secret.new(), Secret.new())


@dataclass(frozen=True)
class Held:
    """One neighbour's shares. At most one of the two is ever opened."""

    seed: Secret
    key: Secret


class Client:
    """One client's side of one session.

    `sessions` records the sessions for which shares were opened; keep it on disk (`OnDisk`) where a client may be restarted. In
    an active session `identity` must be the client's identity in `policy.identities`. `agreements` is for simulations
    (`workers.OneProcess`): leave it out for a client on its own machine. ParameterError if the client must not take part.
    """

    def __init__(
        self,
        parameters: Parameters,
        me: int,
        policy: Policy,
        *,
        identity: Identity | None = None,
        sessions: Sessions | None = None,
        threads: int | None = None,
        agreements: Agreements | None = None,
        _keys: Keys | None = None,  # fixed keys let anybody read the session: for test vectors only
    ) -> None:
        policy.check(parameters)
        if me not in parameters.clients:
            raise ParameterError(f"client {me} is not among the {len(parameters.clients)} that the session invites")
        self.parameters, self.me = parameters, me
        self._window = policy.window
        self._graph: Topology
        known = parameters.clients if parameters.active else ()
        self._identities = tuple((client, policy.identities[client]) for client in known)
        self._identity = identity
        if parameters.active and (identity is None or (me, identity.public) not in self._identities):
            raise ParameterError(f"client {me} has no identity, or not the one that is registered for it")
        self._sessions = InMemory() if sessions is None else sessions
        self._threads = threads
        self._agreements: Agreements = Alone() if agreements is None else agreements
        self._steps = iter(steps(parameters))
        self._next = next(self._steps)
        self._turns = threading.Lock()  # two threads cannot take one step twice
        self._keys: Keys | None = Keys.new() if _keys is None else _keys
        self._held: dict[int, Held] = {}
        self._inbound: dict[int, Secret] = {}

    def advertise(self) -> bytes:
        """Its public keys, and the seed of its choice of neighbours if it has one; signed if the session is active."""
        with self._turn("advertise") as keys:
            choice = keys.choice.reveal() if self.parameters.chosen else b""
            unsigned = Advertise(keys.channel.public, keys.mask.public, choice)
            self._advert = replace(unsigned, signature=self._sign("advertise", unsigned.signed(self.me)))
            return self._advert.to_bytes(self.parameters, self.me)

    def share(self, message: bytes) -> bytes:
        """Shares of its secrets for their holders, after the roster."""
        with self._turn("share") as keys:
            self._agreed: Agreed = judged(bytes(message), self.parameters, self._identities)
            if self._agreed.adverts.get(self.me) != self._advert:
                raise Tampering("the roster does not show this client with the keys that it advertised")
            if self.parameters.chosen:
                related(self.me, self._advert.choice, self._agreed, self.parameters)
                own = chosen_by(self.me, self._advert.choice, self.parameters)
                holders = tuple(sorted(self._agreed.adverts.keys() & set(own)))
            else:
                self._graph = roster_graph(self.parameters, self._agreed)
                holders = self._graph.holders(self.me)
            others = self._agreed.members if self.parameters.active else holders
            adverts = {other: self._agreed.adverts[other] for other in others if other != self.me}
            shares, self._inbound = deal(self.parameters, self.me, keys, adverts, holders, self._agreements)
            return shares.to_bytes(self.parameters, self.me)

    def mask(self, message: bytes, vector: Words) -> bytearray:
        """Its vector, of `length` unsigned words, under its self mask and one mask for each partner that has dealt shares."""
        with self._turn("mask") as keys:
            self._check_vector(vector)
            session = self.parameters.session
            delivery = Delivery.from_bytes(message, self.parameters)
            if self.parameters.active:
                self._graph = dealers_graph(delivery.dealt, self.parameters)
                check_dealt(delivery, self.me, self._advert.choice, self._agreed.adverts, self._graph, self.parameters)
            self._held = collect(delivery, self._inbound, session, self.me)
            self._inbound = {}
            self._dealt = delivery.digest
            partners = self._graph.partners(self.me) if self.parameters.active else tuple(self._held)
            present = self._graph.holders(self.me) if self.parameters.active else partners
            if len(present) < self.parameters.threshold:
                raise Aborted(f"{len(present)} neighbours have dealt shares, fewer than {self.parameters.threshold}")
            publics = {other: self._agreed.adverts[other].mask for other in partners}
            pairs = self._agreements.masks(keys.mask, publics, session, self.me)
            masks = [(keys.seed, 1), *pairs.values()]
            statement = self._sign("masked", Masked.signed(self.me, self._dealt))
            frame, view = Masked.frame(self.parameters, self.me, statement)
            view[:] = vector
            add_masks(view, masks, threads=self._threads)
            return frame

    def confirm(self, message: bytes) -> bytes:
        """Its signature over the list of survivors that it received, once per session. Only in active sessions."""
        with self._turn("confirm"):
            self._accept(message)
            self._sessions.claim(hashlib.sha256(b"signed" + self.parameters.session).digest())  # before it is sent
            signed = Confirm.signed(self.me, self._dealt, self._list)
            return Confirm(self._sign("survivors", signed)).to_bytes(self.parameters, self.me)

    def unmask(self, message: bytes) -> bytes:
        """One share of each neighbour's secrets, after the survivors' list, or in an active session after their signatures."""
        with self._turn("unmask"):
            if self.parameters.active:
                found = signers(bytes(message), self.parameters, self._identities, self._dealt, self._list)
                confirmed(found, self.me, self._survivors, self._graph, self.parameters)
            else:
                self._accept(message)
            self._sessions.claim(self.parameters.session)  # before anything is opened, permanently
            opened = open_shares(self._survivors, self._held).to_bytes(self.parameters, self.me)
            self._forget()
            return opened

    def _accept(self, message: bytes) -> None:
        """Accept a list of survivors, after checking that shares may be opened for it."""
        told = listed(bytes(message), self.parameters)
        self._survivors, self._list = told.present, told.digest
        check_survivors(self._survivors, self.me, self.parameters, self._graph, self._held, self._window)
        if self.parameters.active:
            expected = near(self.me, self._graph, self._survivors)
            check_statements(told.statements, expected, self.parameters, self._identities, self._dealt)

    def _check_vector(self, vector: Words) -> None:
        expected, bound = np.dtype(f"u{self.parameters.bits // 8}"), self.parameters.bound
        if not isinstance(vector, np.ndarray) or vector.dtype != expected or vector.shape != (self.parameters.length,):
            raise RangeError(f"the vector is not an array of {self.parameters.length} words of type {expected}")
        signed = vector.view(f"i{self.parameters.bits // 8}")
        if bound and not -bound <= signed.min() <= signed.max() <= bound:
            raise RangeError(f"a coordinate of the vector is beyond the session's bound of {bound}: clip it first")

    def _sign(self, purpose: str, body: bytes) -> bytes:
        """The signature; empty in a passive session."""
        if self._identity is None or not self.parameters.active:
            return b""  # the constructor has refused a client without identity in an active session
        return self._identity.sign(purpose, self.parameters.session, body)

    @contextmanager
    def _turn(self, step: str) -> Iterator[Keys]:
        """One step. Any error in it finishes the client; a protocol error also states what stays protected."""
        with self._turns:
            try:
                if step != self._next or self._keys is None:
                    due = f"{self._next}() comes next" if self._next else "this client is finished"
                    raise MessageError(f"{step}() is out of turn: {due}")
                yield self._keys
                self._next = next(self._steps, "")
            except BaseException as error:
                place, self._next = self._next, ""
                self._forget()
                if not isinstance(error, ProtocolError) or error.stage:
                    raise
                unopened = "this client's vector stays under its masks, since it has opened no share"
                learnt = {"": "", "confirm": unopened, "unmask": unopened}.get(
                    place, "this client's vector was not sent"
                )
                who, protected = error.who or f"client {self.me}", error.protected or learnt
                raise type(error)(error.what, who=who, stage=step, protected=protected) from error

    def _forget(self) -> None:
        self._keys, self._inbound, self._held = None, {}, {}


def steps(parameters: Parameters) -> tuple[str, ...]:
    """A client's methods in the order in which this session calls them."""
    agreed_list = ("confirm",) if parameters.active else ()
    return ("advertise", "share", "mask", *agreed_list, "unmask")


def related(me: int, mine: bytes, agreed: Agreed, parameters: Parameters) -> None:
    """Where clients choose, check the roster for the client `me`; `mine` is the seed of its own choice.

    Tampering if a client on the roster neither chose `me` nor was chosen by it; Aborted if fewer than `threshold` of the
    clients that it chose take part.
    """
    own = chosen_by(me, mine, parameters)
    for other in agreed.adverts.keys() - {me, *own}:
        if me not in chosen_by(other, agreed.adverts[other].choice, parameters):
            raise Tampering(
                f"client {other} is on the roster, but neither it nor client {me} chose the other as a neighbour"
            )
    present = len(agreed.adverts.keys() & set(own))
    if present < parameters.threshold:
        raise Aborted(f"{present} of the chosen clients take part, fewer than the threshold of {parameters.threshold}")


def deal(
    parameters: Parameters,
    me: int,
    keys: Keys,
    adverts: Mapping[int, Advertise],
    holders: Sequence[int],
    agreements: Agreements,
) -> tuple[Shares, dict[int, Secret]]:
    """Shares of the seed and of the mask key for every holder, each pair sealed so that only its receiver can read it.

    Also returns, for every client in `adverts`, the key for messages from it.
    """
    session = parameters.session
    seeds, privates = split_each((keys.seed, keys.mask.private), parameters.threshold, holders)
    publics = {other: advert.channel for other, advert in adverts.items()}
    channels = agreements.channels(keys.channel, publics, session, me)
    sealed = {
        other: seal(channels[other][0], seed + privates[other], session, me, other) for other, seed in seeds.items()
    }
    inbound = {other: channel[1] for other, channel in channels.items()}
    return Shares(commitment(keys.seed, session, "seed", me), sealed), inbound


def check_dealt(
    delivery: Delivery, me: int, mine: bytes, adverts: Mapping[int, Advertise], graph: Topology, parameters: Parameters
) -> None:
    """In an active session, check the list of the clients that have dealt.

    Tampering unless it agrees with this client's own choice and with the advertised choices of the clients near it, and comes
    with the shares of every owner whose shares this client is to hold; Aborted if too few have dealt.
    """
    dealt = delivery.dealt
    if dealt.get(me) != mine:
        raise Tampering(
            "the list of clients that dealt shares leaves this client out, or has another choice of neighbours for it than it "
            "advertised"
        )
    for other in {*graph.partners(me), *graph.owners(me), *graph.holders(me)}:
        if other not in adverts:
            raise Tampering(f"client {other} is a neighbour of this client, and its keys were not on the roster")
        if adverts[other].choice != dealt[other]:
            raise Tampering(f"client {other} is listed with another choice of neighbours than it advertised")
    if set(delivery.sealed) != set(graph.owners(me)):
        raise Tampering("the delivered shares are not from exactly the clients listed as having dealt them")
    if len(dealt) < parameters.survivors:
        raise Aborted(
            f"{len(dealt)} clients have dealt shares, and no sum of fewer than {parameters.survivors} is opened"
        )
    if isinstance(graph, ChosenGraph):
        graph.require_partners(me, dealt, parameters.partners)


def collect(delivery: Delivery, inbound: Mapping[int, Secret], session: bytes, me: int) -> dict[int, Held]:
    """The shares dealt to `me`, by owner. Tampering if they are a stranger's, or not as the owner sealed them."""
    strangers = delivery.sealed.keys() - inbound.keys()
    if strangers:
        raise Tampering(f"shares of client {min(strangers)}, which is no neighbour, were delivered")
    held: dict[int, Held] = {}
    for owner, sealed in delivery.sealed.items():
        opened = unseal(inbound[owner], sealed, session, owner, me)
        held[owner] = Held(Secret(opened[:SHARE]), Secret(opened[SHARE:]))
    return held


@lru_cache(maxsize=4)
def listed(data: bytes, parameters: Parameters) -> Survivors:
    """The list encoded in these bytes."""
    return Survivors.from_bytes(data, parameters)


def check_survivors(
    survivors: frozenset[int], me: int, parameters: Parameters, graph: Topology, held: Collection[int], window: int
) -> None:
    """Tampering, or Aborted if too few clients are left, unless shares may be opened for this list."""
    if me not in survivors:
        raise Tampering("the list of survivors leaves out this client, which has sent its vector")
    strangers = survivors.difference(graph.order)
    if strangers:
        missing = "has not dealt its shares" if parameters.active else "is not on the roster"
        raise Tampering(f"client {min(strangers)} is listed as a survivor but {missing}")
    undealt = (survivors & frozenset(graph.owners(me))).difference(held)
    if undealt:
        raise Tampering(f"client {min(undealt)} is listed as a survivor but never dealt its shares")
    if len(survivors) < parameters.survivors:
        raise Aborted(f"{len(survivors)} survivors, and no sum of fewer than {parameters.survivors} is opened")
    holders = len(survivors.intersection(graph.holders(me)))
    if holders < parameters.threshold:
        raise Aborted(
            f"{holders} holders of this client's shares survive, fewer than the threshold of {parameters.threshold}"
        )
    if isinstance(graph, ChosenGraph):
        for owner in (me, *graph.owners(me)):
            if owner in survivors:
                graph.require_partners(owner, survivors, parameters.partners)
    elif not graph.holds_together(survivors, window):
        raise Aborted(f"with {window} corrupt in a window of the ring, the survivors could be cut into separate sums")


def check_statements(
    statements: Mapping[int, bytes], expected: Collection[int], parameters: Parameters, known: Identities, dealt: bytes
) -> None:
    """Tampering unless exactly the expected clients signed, with their vectors, the list of dealers with this digest."""
    if set(statements) != set(expected):
        raise Tampering(
            "the signatures on the list of survivors are not those of exactly the survivors near this client"
        )
    identities = dict(known)
    for owner, signature in statements.items():
        if not states(owner, signature, parameters, identities[owner], dealt):
            raise Tampering(
                f"client {owner} is listed as a survivor but masked under another list of dealers than this client's"
            )


def open_shares(survivors: frozenset[int], held: Mapping[int, Held]) -> Opened:
    """For every neighbour that dealt shares, the share that the list requires."""
    return Opened(
        seeds={owner: share.seed.reveal() for owner, share in held.items() if owner in survivors},
        keys={owner: share.key.reveal() for owner, share in held.items() if owner not in survivors},
    )


def confirmed(
    signers: frozenset[int], me: int, survivors: frozenset[int], graph: Topology, parameters: Parameters
) -> None:
    """Tampering or Aborted unless enough of the survivors have signed the list."""
    everybody = signers | {me}  # this client has signed, whether or not the server returns its signature
    strangers = everybody - survivors
    if strangers:
        raise Tampering(f"client {min(strangers)} signed a list of survivors that does not contain it")
    holders = len(everybody.intersection(graph.holders(me)))
    if holders < parameters.threshold or len(everybody) < parameters.signers:
        raise Aborted(
            f"the list of survivors is signed by {holders} holders of this client's shares and {len(everybody)} clients in "
            f"all, fewer than {parameters.threshold} and {parameters.signers}"
        )


@lru_cache(maxsize=4)
def signers(
    data: bytes, parameters: Parameters, identities: Identities, dealt: bytes, survivors: bytes
) -> frozenset[int]:
    """The clients that signed the lists with these digests. Tampering if a client signed others."""
    known = dict(identities)
    signatures = Confirmations.from_bytes(data, parameters).signatures
    for owner, signature in signatures.items():
        if owner not in known or not signs(owner, signature, parameters, known[owner], dealt, survivors):
            raise Tampering(f"client {owner} has not signed the list of survivors that was shown here")
    return frozenset(signatures)


Message = bytes | bytearray


@dataclass(frozen=True)
class Waiting:
    """A message that another process is making. send: passes the request to that process."""

    future: Future[tuple[Message, float]]
    send: Callable[[], None]

    def result(self) -> tuple[Message, float]:
        """The message, and the seconds that it took."""
        self.send()
        return self.future.result()


class Played(Protocol):
    """The interface of `Client`, whose messages may be made in another process."""

    @property
    def parameters(self) -> Parameters: ...

    def advertise(self) -> Message | Waiting: ...

    def share(self, message: bytes) -> Message | Waiting: ...

    def mask(self, message: bytes, vector: Words) -> Message | Waiting: ...

    def confirm(self, message: bytes) -> Message | Waiting: ...

    def unmask(self, message: bytes) -> Message | Waiting: ...


class Players(Protocol):
    """Makes clients. Each client has one record of opened sessions, for all its sessions."""

    def client(self, parameters: Parameters, me: int, policy: Policy, identity: Identity | None) -> Played:
        """A `Client` of a session, constructed by its first step at the latest."""


@dataclass(frozen=True)
class OneClient:
    """The only client of this machine. sessions: its record of opened sessions, on disk if it may restart."""

    sessions: Sessions

    def client(self, parameters: Parameters, me: int, policy: Policy, identity: Identity | None) -> Client:
        return Client(parameters, me, policy, identity=identity, sessions=self.sessions)


@dataclass
class Here:
    """Clients that this process plays. agreements: how they obtain their shared keys; None: each by itself."""

    agreements: Agreements | None = None
    _records: dict[int, InMemory] = field(default_factory=dict)

    def client(self, parameters: Parameters, me: int, policy: Policy, identity: Identity | None) -> Client:
        record = self._records.setdefault(me, InMemory())
        return Client(parameters, me, policy, identity=identity, sessions=record, agreements=self.agreements)
