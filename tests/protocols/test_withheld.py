"""An attack on one client's vector: the server withholds deliveries, so that some edges of the graph carry no mask.

All clients are honest. The server tells the victim that half of its partners have not dealt shares, so the victim shares no
masks with them. At the end it tells all other clients that the other half dropped out, so that their masks with the victim can
be removed. Only the self mask is left on the victim's vector. Both lists are long enough, and every client has the holders it
needs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import protocols.client
from protocols.errors import ProtocolError, Tampering
from protocols.keys import AgreementKey, Secret, pair_mask
from protocols.masking import add_masks
from protocols.roster import near
from protocols.sharing import Rebuilder
from protocols.wire import Confirm, Confirmations, Delivery, Masked, Opened, Survivors
from tests.protocols.sessions import Cast, Play, cast, play

CAST: dict[str, Any] = {"count": 40, "neighbours": 8, "threshold": 5, "active": True, "partners": 1, "length": 6}


class Server:
    """A server that lies from the deliveries on. `opened`: by client, the shares of seeds and mask keys that it has opened."""

    def __init__(self) -> None:
        while not self._begun():
            pass  # until some client's partners can be halved: the server has no influence on the choices

    def _begun(self) -> bool:
        self.scene: Play = play(cast(**CAST), until="mask")
        made, self.graph = self.scene.cast, self.scene.server._graph
        for self.victim in made.ids:
            partners, firsts = self.graph.partners(self.victim), self.graph.firsts(self.victim)  # type: ignore[union-attr]
            ordered = sorted(partners, key=lambda one: (one in firsts, one in self.graph.holders(self.victim)))
            self.withheld, self.dropped = set(ordered[::2]), set(ordered[1::2])
            if all(self._borne(made, gone) for gone in (self.withheld, self.dropped)):
                return True
        return False

    def _borne(self, made: Cast, gone: set[int]) -> bool:
        """Whether no remaining client refuses because `gone` are missing, and every secret can still be rebuilt."""
        left = set(made.ids) - gone
        signing = left - {self.victim}  # the victim signs another list: its signature is shown to nobody
        for me in made.ids:
            if len(signing.intersection(self.graph.holders(me))) < made.parameters.threshold:
                return False
            if me in left and not left.intersection(self.graph.firsts(me)):  # type: ignore[union-attr]
                return False
        return len(signing) >= max(made.parameters.survivors, made.parameters.signers)

    def attack(self) -> tuple[dict[int, ProtocolError], np.ndarray[Any, Any] | None]:
        """The errors of the clients that refused, and the victim's vector if the server can compute it."""
        errors: dict[int, ProtocolError] = {}

        def ask(stage: str, messages: dict[int, bytes]) -> dict[int, bytes]:
            answers = {}
            for me, message in messages.items():
                try:
                    answers[me] = self.scene.act(stage, me, message)
                except ProtocolError as error:
                    errors[me] = error
            return answers

        parameters, told = self.scene.cast.parameters, dict(self.scene.told)
        true = Delivery.from_bytes(told["mask", self.victim], parameters)
        lie = [{me: part for me, part in some.items() if me not in self.withheld} for some in (true.sealed, true.dealt)]
        deliveries = {me: told["mask", me] for me in self.scene.cast.ids}
        masked = ask("mask", deliveries | {self.victim: Delivery(*lie).to_bytes(parameters)})
        vectors = {me: Masked.from_bytes(message, parameters, me) for me, message in masked.items()}

        survivors = tuple(me for me in self.scene.cast.ids if me not in self.dropped)
        lists = {
            me: Survivors(survivors, {one: vectors[one].signature for one in near(me, self.graph, survivors)})
            for me in survivors
        }
        signed = ask("consistency", {me: message.to_bytes(parameters) for me, message in lists.items()})
        signatures = {
            me: Confirm.from_bytes(message, parameters, me).signature
            for me, message in signed.items()
            if me != self.victim
        }
        confirmed = Confirmations(signatures).to_bytes(parameters)
        answers = ask("unmask", dict.fromkeys(signatures, confirmed))
        opened = {me: Opened.from_bytes(message, parameters, me) for me, message in answers.items()}
        return errors, self._read(vectors[self.victim].vector.copy(), opened)

    def _read(self, words: np.ndarray[Any, Any], opened: dict[int, Opened]) -> np.ndarray[Any, Any] | None:
        """The victim's vector, from its seed and the mask keys of the clients listed as dropped out; None if one is missing."""
        parameters, session = self.scene.cast.parameters, self.scene.cast.parameters.session
        server = self.scene.server

        def rebuilt(owner: int, kind: str, fits: Any) -> Secret | None:
            shares = {me: getattr(one, kind)[owner] for me, one in opened.items() if owner in getattr(one, kind)}
            if len(shares) < parameters.threshold:
                return None
            return Rebuilder().rebuild(shares, parameters.threshold, fits)[0]

        seed = rebuilt(self.victim, "seeds", lambda _: True)
        if seed is None:
            return None
        masks = [(seed, -1)]
        for other in self.dropped.intersection(self.graph.partners(self.victim)):
            key = rebuilt(other, "keys", lambda _: True)
            if key is None:
                return None
            public = server._adverts[self.victim].mask
            masks.append(pair_mask(AgreementKey.from_secret(key), public, session, other, self.victim))
        add_masks(words, masks)
        return words


def test_a_server_that_withholds_deliveries_reads_nobody() -> None:
    server = Server()
    errors, found = server.attack()
    assert found is None
    beside = {me for me in server.scene.cast.ids if server.victim in near(me, server.graph, server.scene.cast.ids)}
    noticed = beside - server.dropped
    assert {me for me, error in errors.items() if isinstance(error, Tampering)} == noticed | {server.victim}
    assert all("masked under another list" in errors[me].what for me in noticed - {server.victim})


def test_it_would_read_the_victim_if_nobody_asked_by_which_list_the_others_masked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every other check passes: the graph has its edges, survivors are enough, and enough clients have signed one list."""
    monkeypatch.setattr(protocols.client, "check_statements", lambda *of: None)
    server = Server()
    errors, found = server.attack()
    assert set(errors) <= {server.victim}
    assert found is not None
    assert found.tolist() == server.scene.vectors[server.victim].tolist()
