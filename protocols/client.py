"""A client of one session: bytes in, bytes out, no input or output of its own.

Its steps come in order and each once; anything else is `MessageError`. After any error the client is finished: its secrets are
dropped and it answers nothing more. What it believes of the server it judges by its own `Policy` and its own state.

What leaves it, and when: public keys; shares sealed to neighbours; its vector under its masks; and at most one share of each
neighbour, once per session, after `Sessions.claim` has recorded that durably.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from protocols.dealing import Held, Keys, collect, deal
from protocols.errors import Aborted, MessageError, ParameterError, ProtocolError, RangeError, Tampering
from protocols.graph import Graph
from protocols.keys import Identity, Secret, commitment, pair_mask
from protocols.masking import add_masks
from protocols.messages import Advertise, Confirm, Delivery, Masked, Reveal, Words
from protocols.opening import check_survivors, confirmed, listed, open_shares, signers
from protocols.parameters import Parameters, Policy
from protocols.record import InMemory, Sessions
from protocols.roster import Agreed, Identities, drawn, judged, topology


class Client:
    """One client's side of one session.

    `sessions` remembers what was opened; keep it on disk (`OnDisk`) where a client may be restarted. In an active session
    `identity` is the one that `policy.identities` has registered for it. ParameterError if the client must not take part.
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
        _keys: Keys | None = None,  # fixed keys make a session anybody can read: for test vectors alone
    ) -> None:
        policy.check(parameters)
        if me not in parameters.clients:
            raise ParameterError(f"client {me} is not among the {len(parameters.clients)} that the session invites")
        self.parameters, self.me = parameters, me
        self._window = policy.window
        self._identities, self._identity = _registered(parameters, policy), identity
        if parameters.active and (identity is None or (me, identity.public) not in self._identities):
            raise ParameterError(f"client {me} has no identity, or not the one that is registered for it")
        self._sessions = InMemory() if sessions is None else sessions
        self._threads = threads
        self._steps = iter(steps(parameters))
        self._next = next(self._steps)
        self._turns = threading.Lock()  # two threads cannot take one step twice
        self._keys: Keys | None = Keys.new() if _keys is None else _keys
        self._held: dict[int, Held] = {}
        self._inbound: dict[int, Secret] = {}

    def advertise(self) -> bytes:
        """Its public keys, signed if the session is active."""
        with self._turn("advertise") as keys:
            committed = self._commitment(keys) if self.parameters.draws else b""
            unsigned = Advertise(keys.channel.public, keys.mask.public, committed)
            signature = self._sign("advertise", unsigned.signed(self.me)) if self.parameters.active else b""
            self._advert = Advertise(unsigned.channel, unsigned.mask, committed, signature)
            return self._advert.to_bytes(self.parameters, self.me)

    def reveal(self, roster: bytes) -> bytes:
        """Its part of the joint randomness, signed together with the roster. Only where the graph is drawn."""
        with self._turn("reveal") as keys:
            self._meet(roster)
            secret = keys.draw.reveal()
            signature = self._sign("reveal", Reveal.signed(self.me, self._agreed.digest, secret))
            return Reveal(secret, signature).to_bytes(self.parameters, self.me)

    def share(self, message: bytes) -> bytes:
        """Shares of its secrets for its neighbours, after the roster, or after the reveals where the graph is drawn."""
        with self._turn("share") as keys:
            seed = None
            if self.parameters.draws:
                seed = drawn(bytes(message), self.parameters, self._identities, self._roster)
            else:
                self._meet(message)
            self._graph: Graph = topology(self.parameters, self._agreed, seed)
            neighbours = {other: self._agreed.adverts[other] for other in self._graph.neighbours(self.me)}
            shares, self._inbound = deal(self.parameters, self.me, keys, neighbours)
            return shares.to_bytes(self.parameters, self.me)

    def mask(self, message: bytes, vector: Words) -> bytearray:
        """Its vector, of `length` unsigned words, under its own mask and one for each neighbour that has dealt shares."""
        with self._turn("mask") as keys:
            self._check_vector(vector)
            session = self.parameters.session
            delivery = Delivery.from_bytes(message, self.parameters)
            self._held = collect(delivery, self._inbound, session, self.me)
            self._inbound = {}
            if len(self._held) < self.parameters.threshold:
                raise Aborted(f"{len(self._held)} neighbours have dealt shares, fewer than {self.parameters.threshold}")
            masks = [(keys.seed, 1)]
            for other in self._held:
                masks.append(pair_mask(keys.mask, self._agreed.adverts[other].mask, session, self.me, other))
            frame, view = Masked.frame(self.parameters, self.me)
            view[:] = vector
            add_masks(view, masks, threads=self._threads)
            return frame

    def confirm(self, message: bytes) -> bytes:
        """Its signature over the list of survivors that it was shown. Only in an active session."""
        with self._turn("confirm"):
            self._accept(message)
            signed = Confirm.signed(self.me, self._agreed.digest, hashlib.sha256(self._list).digest())
            return Confirm(self._sign("survivors", signed)).to_bytes(self.parameters, self.me)

    def unmask(self, message: bytes) -> bytes:
        """One share of each neighbour's secrets, after the survivors, or in an active session after their signatures."""
        with self._turn("unmask"):
            if self.parameters.active:
                known, digest = self._identities, self._agreed.digest
                found = signers(bytes(message), self.parameters, known, digest, self._list)
                confirmed(found, self.me, self._survivors, self._graph, self.parameters.threshold)
            else:
                self._accept(message)
            self._sessions.claim(self.parameters.session)  # before anything is opened, and for good
            opened = open_shares(self._survivors, self._held).to_bytes(self.parameters, self.me)
            self._forget()
            return opened

    def _meet(self, message: bytes) -> None:
        """Accept a roster on which this client is as it advertised itself."""
        self._roster = bytes(message)
        self._agreed: Agreed = judged(self._roster, self.parameters, self._identities)
        if self._agreed.adverts.get(self.me) != self._advert:
            raise Tampering("the roster does not show this client with the keys that it advertised")

    def _accept(self, message: bytes) -> None:
        """Accept a list of survivors for which shares may be opened."""
        self._list = bytes(message)
        self._survivors = listed(self._list, self.parameters)
        check_survivors(self._survivors, self.me, self.parameters, self._graph, self._held, self._window)

    def _check_vector(self, vector: Words) -> None:
        expected, bound = np.dtype(f"u{self.parameters.bits // 8}"), self.parameters.bound
        if not isinstance(vector, np.ndarray) or vector.dtype != expected or vector.shape != (self.parameters.length,):
            raise RangeError(f"the vector is not an array of {self.parameters.length} words of type {expected}")
        signed = vector.view(f"i{self.parameters.bits // 8}")
        if bound and not -bound <= signed.min() <= signed.max() <= bound:
            raise RangeError(f"a coordinate of the vector is beyond the session's bound of {bound}: clip it first")

    def _commitment(self, keys: Keys) -> bytes:
        return commitment(keys.draw, self.parameters.session, "graph", self.me)

    def _sign(self, purpose: str, body: bytes) -> bytes:
        if self._identity is None:  # the constructor has refused such a client
            raise ParameterError(f"client {self.me} has no identity to sign with")
        return self._identity.sign(purpose, self.parameters.session, body)

    @contextmanager
    def _turn(self, step: str) -> Iterator[Keys]:
        """One step. Whatever goes wrong in it finishes the client, and says what is protected all the same."""
        with self._turns:
            try:
                if step != self._next or self._keys is None:
                    raise MessageError(f"{step}() is out of turn: {_due(self._next)}")
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
    drawn_graph = ("reveal",) if parameters.draws else ()
    agreed_list = ("confirm",) if parameters.active else ()
    return ("advertise", *drawn_graph, "share", "mask", *agreed_list, "unmask")


def _registered(parameters: Parameters, policy: Policy) -> Identities:
    if not parameters.active:
        return ()
    return tuple((client, policy.identities[client]) for client in parameters.clients)


def _due(step: str) -> str:
    return f"{step}() comes next" if step else "this client is finished"


def _told(error: ProtocolError, who: str, step: str, place: str) -> ProtocolError:
    """The same error, with whose it is, where it struck and what nobody has learnt."""
    learnt = {"": "", "confirm": _UNOPENED, "unmask": _UNOPENED}.get(place, "this client's vector was not sent")
    return type(error)(error.what, who=error.who or who, stage=step, protected=error.protected or learnt)


_UNOPENED = "this client's vector stays under its masks, since it has opened no share"
