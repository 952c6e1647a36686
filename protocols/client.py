"""A client of one session: bytes in, bytes out, no input or output of its own.

Its steps come in order, each once; anything else is a `MessageError`. After any error the client is finished: it drops its
secrets and answers nothing more. It judges the server's messages by its own `Policy` and its own state.

It sends, in this order: public keys; shares sealed to neighbours; its vector under its masks; and at most one share of each
neighbour, once per session, after `Sessions.claim` has recorded this durably.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from protocols.agreements import Agreements, Alone
from protocols.codec import Words
from protocols.dealing import Held, Keys, check_dealt, collect, deal
from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, RangeError, Tampering
from protocols.keys import Identity, Secret
from protocols.masking import add_masks
from protocols.messages import Advertise, Confirm, Delivery, Masked
from protocols.opening import check_statements, check_survivors, confirmed, listed, open_shares, signers
from protocols.parameters import Parameters
from protocols.policy import Policy
from protocols.record import InMemory, Sessions
from protocols.roster import Agreed, Topology, chosen_by, judged, near, related, topology, topology_of


class Client:
    """One client's side of one session.

    `sessions` records the sessions for which shares were opened; keep it on disk (`OnDisk`) where a client may be restarted. In
    an active session `identity` must be the client's identity in `policy.identities`. `agreements` is for simulations
    (`one_process`): leave it out for a client on its own machine. ParameterError if the client must not take part.
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
            holders = self._holders()
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
                self._graph = topology_of(delivery.dealt, self.parameters)
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

    def _holders(self) -> tuple[int, ...]:
        """The holders of its shares, among the clients on the roster."""
        if not self.parameters.chosen:
            self._graph = topology(self.parameters, self._agreed)
            return self._graph.holders(self.me)
        related(self.me, self._advert.choice, self._agreed, self.parameters)
        own = chosen_by(self.me, self._advert.choice, self.parameters)
        return tuple(sorted(self._agreed.adverts.keys() & set(own)))

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
                if isinstance(error, ProtocolError) and not error.stage:
                    raise _told(error, f"client {self.me}", step, place) from error
                raise

    def _forget(self) -> None:
        self._keys, self._inbound, self._held = None, {}, {}


def steps(parameters: Parameters) -> tuple[str, ...]:
    """A client's methods in the order in which this session calls them."""
    agreed_list = ("confirm",) if parameters.active else ()
    return ("advertise", "share", "mask", *agreed_list, "unmask")


def _told(error: ProtocolError, who: str, step: str, place: str) -> ProtocolError:
    """The same error, with the party, the step, and what stays protected."""
    learnt = {"": "", "confirm": _UNOPENED, "unmask": _UNOPENED}.get(place, "this client's vector was not sent")
    return type(error)(error.what, who=error.who or who, stage=step, protected=error.protected or learnt)


_UNOPENED = "this client's vector stays under its masks, since it has opened no share"
