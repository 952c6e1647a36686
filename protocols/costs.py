"""The cost of a session, in closed form.

With n clients, d words of w bytes, h holders of each client's shares (n - 1 on a complete graph, else k), D clients dropped:

    bytes, a client up      d w + O(h)          down   O(n) for lists, O(h) for keys (O(n) if clients do not choose) and shares
    work, a client          2 h agreements (up to 3 h if clients choose), O(h t) for the shares, (h + 1) d words of keystream
                            and additions
    work, the server        n d additions; n secrets rebuilt at O(h) each (O(h^2) when the holders change), (n + D h) d words
                            of keystream
"""

from __future__ import annotations

from typing import NamedTuple

from protocols.messages import DIGEST, SEALED, SHARE, SIGNATURE, Advertise, seeds
from protocols.parameters import Parameters, stages
from protocols.wire import HEADER

_ID, _COUNT = 4, 4


class Traffic(NamedTuple):
    """Bytes of one client in one stage, while nobody drops out."""

    up: int
    down: int


def traffic(parameters: Parameters) -> dict[str, Traffic]:
    """By stage, in order. down: the message that a client answers in this stage; in the first stage, the parameters.

    Where clients choose, the number of clients near a client depends on the choices: sizes are expectations, to the nearest
    byte. Everything sent up, and the shares, are exact means over all clients.
    """
    clients, holders, active = len(parameters.clients), parameters.holders, parameters.active
    advert = sum(Advertise.sizes(parameters))
    shown, near = _near(parameters)
    survivors = _table(clients, 0) + (_table(near, SIGNATURE) if active else 0)
    dealt = _table(holders, SEALED)
    signature = SIGNATURE if active else 0
    up = {
        "advertise": advert,
        "share": DIGEST + dealt,
        "mask": parameters.length * parameters.bits // 8 + signature,
        "consistency": SIGNATURE,
        "unmask": _table(holders, SHARE) + _table(0, SHARE),
    }
    down = {
        "share": _table(shown, advert),
        "mask": dealt + (_table(clients, seeds(parameters)) if active else 0),
        "consistency": survivors,
        "unmask": _table(clients, SIGNATURE) if active else survivors,
    }
    invitation = len(parameters.to_bytes())
    return {
        name: Traffic(round(HEADER.size + up[name]), round(HEADER.size + down[name]) if name in down else invitation)
        for name in stages(parameters)
    }


def _near(parameters: Parameters) -> tuple[float, float]:
    """The number of advertisements that a client receives, and of clients near it when the survivors are listed."""
    clients, k, m = len(parameters.clients), parameters.neighbours, parameters.masked
    if not parameters.chosen:
        return clients, clients - 1
    return 1 + 2 * k - k * k / (clients - 1), k + m - k * m / (clients - 1)


def _table(entries: float, width: int) -> float:
    return _COUNT + entries * (_ID + width)
