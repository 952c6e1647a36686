"""Secure aggregation in a run: whether there was any, how its parameters were chosen, and what it took.

Where privacy protects somebody, neither survivors nor seconds are told on a page for everybody: both tell who took part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from secure_fed.report.formatting import number, power_of_two, size, time
from secure_fed.report.page.markup import facts, paragraph, section, subsection
from secure_fed.report.page.record import RunRecord

Rows = list[tuple[str, str]]
Facts = Mapping[str, Any]


def masked(record: RunRecord) -> bool:
    """Whether contributions travelled behind masks: asked for, and borne out by every round and by the result."""
    borne_out = all(row.get("masked") for row in record.rounds)
    finished = record.result is None or bool(record.result.get("secure_aggregation"))
    return record.config.secure_aggregation.enabled and borne_out and finished


def missing(record: RunRecord) -> bool:
    """Whether masks were asked for, and the files do not bear them out."""
    return record.config.secure_aggregation.enabled and not masked(record)


def colluding(record: RunRecord) -> str:
    """How many clients are assumed to help the server, at most."""
    share, found = record.config.secure_aggregation.corrupt, (record.result or {}).get("secure_aggregation")
    if not share:
        return "no client is in league with the server"
    if not found or record.hides_cohort or record.draws_by_coins:
        return f"at most {100 * share:g} % of a round's clients, rounded down, are in league with the server"
    most = math.floor(Fraction(str(share)) * found["clients"])
    return f"{_at_most(most)} of the {number(found['clients'])} clients invited to a sum {_is(most)} in league with the server"


def secure_aggregation(record: RunRecord) -> str:
    """What the masks were made of, and what they took."""
    if missing(record):
        return section("Secure aggregation: NOT FOUND", paragraph(_MISSING), css_class="privacy warning")
    if not masked(record):
        return ""
    found = (record.result or {}).get("secure_aggregation")
    return section(
        "Secure aggregation",
        _caught(record),
        subsection(
            "What it took", paragraph(_TAKES), facts([*_traffic(record, found), *_time(record, found)], "terms")
        ),
        subsection("How it was set", facts(_protocol(record, found), "terms")) if found else "",
    )


def _caught(record: RunRecord) -> str:
    """Which rounds were lost, and which clients lied in the protocol; nothing where there was neither."""
    lost = [(f"round {number(row['round'])} lost", str(row["lost"])) for row in record.rounds if row.get("lost")]
    caught = {name: how for row in record.rounds for name, how in row.get("caught", {}).items()}
    rows = [*lost, *((f"client {name}", f"{how}; {_BLAME[how]}") for name, how in caught.items() if how in _BLAME)]
    return subsection("What went wrong", paragraph(_LOST), facts(rows, "terms")) if rows else ""


def _traffic(record: RunRecord, found: Facts | None) -> Rows:
    """Bytes either way."""
    expected = ", expected" if record.hides_cohort else ""
    return [
        (
            f"{name}{expected}",
            size(_total(record, key)) + _each(size(_total(record, key) / _turns(record, found)), found),
        )
        for name, key in (("sent by the clients", "bytes_up"), ("sent to the clients", "bytes_down"))
    ]


def _time(record: RunRecord, found: Facts | None) -> Rows:
    """Seconds on either side, and who stayed."""
    if record.hides_cohort or not record.series("masked", "client_seconds"):
        return [("time, and who stayed", "not told, since it would tell how many took part")]
    clients = _total(record, "client_seconds")
    invited = f" of {number(found['clients'])} invited" if found else ""
    told = [row["masked"].get("survivors") for row in record.rounds]
    fewest = min((count for count in told if count is not None), default=None)
    return [
        ("time of all clients together", time(clients) + _each(time(clients / _turns(record, found)), found)),
        ("time of the server", time(_total(record, "server_seconds"))),
        ("clients in the smallest sum", number(fewest) + invited),
    ]


def _protocol(record: RunRecord, found: Facts) -> Rows:
    """The parameters of a sum, and what they are good for."""
    clients, neighbours = number(found["clients"]), number(found["neighbours"])
    complete = found["neighbours"] >= found["clients"] - 1
    more = ", or more where coins draw more; where they draw fewer, others send zeros" if record.draws_by_coins else ""
    if record.draws_by_coins and record.hides_cohort:
        more = ", however many of them the coins draw: the others send zeros"
    left = f"nothing is unmasked with fewer than {number(found['least'])} of them left"
    among = _CHOSEN if found["active"] else _RING
    return [
        (
            "server",
            "may lie: clients check and sign what they are told"
            if found["active"]
            else "is assumed to keep to the protocol",
        ),
        ("clients invited to a sum", f"{clients}{more}; {left}"),
        ("masks", f"shared with {'all ' if complete else ''}{neighbours} others{'' if complete else among}"),
        ("threshold", f"{number(found['threshold'])} of these others together open a client's masks"),
        ("in league with the server", _league(found)),
        ("sums lost by chance", _abort(found)),
        ("numbers in a sum", f"{found['bits']} bits each"),
    ]


def _league(found: Facts) -> str:
    """How many of those who share a client's masks are assumed to help the server, and what chance has to do with it."""
    those = f"{_at_most(found['corrupt'])} of the {number(found['neighbours'])} that a client shares masks with"
    if not found["failure"]:
        return f"{those}, by assumption; nothing is left to chance"
    return f"{those}, but for a chance of at most {power_of_two(found['failure'])} in each sum"


def _abort(found: Facts) -> str:
    if not found["abort"]:
        return "none, unless more clients vanish than foreseen"
    return f"each with a chance of at most {power_of_two(found['abort'])}, or where more clients vanish than foreseen"


def _each(amount: str, found: Facts | None) -> str:
    return f", about {amount} for each client and round" if found else ""


def _turns(record: RunRecord, found: Facts | None) -> int:
    """How often a client was invited to a round."""
    return max(1, len(record.rounds) * found["clients"]) if found else 1


def _total(record: RunRecord, name: str) -> float:
    return float(sum(row["masked"][name] for row in record.rounds))


def _at_most(count: int) -> str:
    return f"at most {number(count)}" if count else "none"


def _is(count: int) -> str:
    return "is" if count < 2 else "are"


_TAKES = (
    "The bytes are of everything that travelled: keys, shares of secrets, masked numbers, and the model on its way to the"
    " clients. The times are without training, on the machine of this simulation, where all clients take turns."
)
_LOST = (
    "Nothing of a lost round was applied, and its charges stay. A client that dealt wrong shares was left out of the rounds"
    " that followed."
)
_BLAME = {
    "dealt wrong shares": "left out from then on, unless many clients that held its shares lied together",
    "opened wrong shares": "they were corrected, unless the client that dealt them was the liar",
}
_RING = ", on a ring in random order"
_CHOSEN = " on average: each client chooses its own"
_MISSING = (
    "The run asked for secure aggregation, but its files do not show that there was any: treat it as a run in which the server"
    " saw what every single client sent."
)
