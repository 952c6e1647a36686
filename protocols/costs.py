"""What a session costs, in closed form.

With n clients, d words of w bytes, h holders of each client's shares (n - 1 on a complete graph, else k), D clients dropped:

    bytes, a client up      d w + O(h)          down   O(n) for the roster, O(h) for the shares
    work, a client          h agreements, O(h t) for the shares, (h + 1) d words of keystream and additions
    work, the server        n d additions; n secrets rebuilt at O(t) each, (n + D h) d words of keystream
"""

from __future__ import annotations

from typing import NamedTuple

from protocols.messages import DIGEST, HEADER, SEALED, SHARE, SIGNATURE, Advertise
from protocols.parameters import Parameters, stages

_ID, _COUNT = 4, 4


class Traffic(NamedTuple):
    """Bytes of one client in one stage, while nobody drops out."""

    up: int
    down: int


def traffic(parameters: Parameters) -> dict[str, Traffic]:
    """By stage, in order. What comes down in a stage is what a client needs to answer in it; in the first, the parameters."""
    clients, holders = len(parameters.clients), parameters.holders
    advert = sum(Advertise.sizes(parameters))
    roster = _table(clients, advert)
    survivors = _table(clients, 0)
    dealt = _table(holders, SEALED)
    up = {
        "advertise": advert,
        "reveal": DIGEST + SIGNATURE,
        "share": DIGEST + dealt,
        "mask": parameters.length * parameters.bits // 8,
        "consistency": SIGNATURE,
        "unmask": _table(holders, SHARE) + _table(0, SHARE),
    }
    down = {
        "reveal": roster,
        "share": _table(clients, DIGEST + SIGNATURE) if parameters.draws else roster,
        "mask": dealt,
        "consistency": survivors,
        "unmask": _table(clients, SIGNATURE) if parameters.active else survivors,
    }
    invitation = len(parameters.to_bytes())
    return {
        name: Traffic(HEADER.size + up[name], HEADER.size + down[name] if name in down else invitation)
        for name in stages(parameters)
    }


def _table(entries: int, width: int) -> int:
    return _COUNT + entries * (_ID + width)
