"""Secure aggregation in a run: whether there was any, its parameters, and its cost.

In a private run, survivors and seconds are withheld from the page that may be passed on: both depend on who took part.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from secure_fed.report.formatting import number, power_of_two, size, time
from secure_fed.report.markup import facts, folded, paragraph, section, subsection, table
from secure_fed.report.record import RunRecord

Rows = list[tuple[str, str]]
Facts = Mapping[str, Any]


def masked(record: RunRecord) -> bool:
    """Whether contributions travelled behind masks: enabled, and confirmed by every round and by the result."""
    confirmed = all(row.get("masked") for row in record.rounds)
    finished = record.result is None or bool(record.result.get("secure_aggregation"))
    return record.config.secure_aggregation.enabled and confirmed and finished


def missing(record: RunRecord) -> bool:
    """Whether masks were enabled, and the files do not confirm them."""
    return record.config.secure_aggregation.enabled and not masked(record)


def colluding(record: RunRecord) -> str:
    """The most clients that are assumed to collude with the server, as part of a sentence."""
    share, found = record.config.secure_aggregation.corrupt, (record.result or {}).get("secure_aggregation")
    if not share:
        return "no client colludes with the server"
    if not found or record.hides_cohort or record.draws_by_coins:
        return f"at most {100 * share:g} % of a round's clients, rounded up, collude with the server"
    from protocols import thresholds

    most = thresholds.colluding(found["clients"], share)
    verb = "colludes" if most < 2 else "collude"
    return f"{_at_most(most)} of the {number(found['clients'])} clients invited to a sum {verb} with the server"


def secure_aggregation(record: RunRecord) -> str:
    """The parameters of the masks and their cost, folded away; problems are shown unfolded."""
    if missing(record):
        return section("Secure aggregation: NOT FOUND", paragraph(_MISSING), css_class="privacy warning")
    if not masked(record):
        return ""
    found = (record.result or {}).get("secure_aggregation")
    counted = f"{_TAKES} {_DEPLOYED if record.deployed else _SIMULATED}"
    return section(
        "Secure aggregation",
        _caught(record),
        _counting(record, found),
        folded("Its cost", paragraph(counted), facts([*_traffic(record, found), *_time(record, found)], "terms")),
        folded("Its parameters", facts(_protocol(record, found), "terms")) if found else "",
    )


def _counting(record: RunRecord, found: Facts | None) -> str:
    """From a round's clients to the shares of noise that the guarantee counts, by subtraction; empty for drawn cohorts."""
    if not found or "shares" not in found or found["coins"] or record.draws_by_coins:
        return ""
    from protocols import thresholds

    invited, least = found["clients"], found["least"]
    rows = [("clients invited to a round's sum", number(invited))]
    rows += [("that may drop out", f"− {number(invited - least)}"), (_LEAST, f"= {number(least)}")]
    if found["shares"] is not None:
        most = thresholds.colluding(invited, record.config.secure_aggregation.corrupt)
        rows += [("that may collude with the server, which then knows their shares of the noise", f"− {number(most)}")]
        rows += [("shares of noise that the guarantee counts", f"= {number(found['shares'])}")]
    return subsection("Who is counted in a sum", table(("clients", "number"), rows))


def _caught(record: RunRecord) -> str:
    """Lost rounds, and clients that lied in the protocol; empty where there were none."""
    lost = [(f"round {number(row['round'])} lost", str(row["lost"])) for row in record.rounds if row.get("lost")]
    caught = {name: how for row in record.rounds for name, how in row.get("caught", {}).items()}
    lost_rounds = f"{_LOST} {_LEFT_OUT_SECRETLY if record.hides_cohort else _LEFT_OUT}"
    rows = [*lost, *((f"client {name}", f"{how}; {_BLAME[how]}") for name, how in caught.items() if how in _BLAME)]
    return subsection("What went wrong", paragraph(lost_rounds), facts(rows, "terms")) if rows else ""


def _traffic(record: RunRecord, found: Facts | None) -> Rows:
    """Bytes in each direction."""
    expected, rows = ", expected" if record.hides_cohort else "", []
    for name, key in (("sent by the clients", "bytes_up"), ("sent to the clients", "bytes_down")):
        total = _total(record, key)
        rows.append((f"{name}{expected}", size(total) + _each(size(total / _turns(record, found)), found)))
    return rows


def _time(record: RunRecord, found: Facts | None) -> Rows:
    """Seconds of clients and server, and survivors of the smallest sum; withheld where they would reveal the cohort."""
    if record.hides_cohort or not record.series("masked", "client_seconds"):
        in_turn = record.config.federation.sampling == "schedule"
        why = "withheld: they tell of clients" if in_turn else "hidden, because they would reveal the cohort size"
        return [("time, and number of survivors", why)]
    invited = f" of {number(found['clients'])} invited" if found else ""
    survivors = [row["masked"].get("survivors") for row in record.rounds]
    fewest = min((count for count in survivors if count is not None), default=None)
    clients = "not measured: each client ran on its own node"
    if not record.deployed:
        seconds = _total(record, "client_seconds")
        clients = time(seconds) + _each(time(seconds / _turns(record, found)), found)
    return [
        ("time of all clients together", clients),
        ("time of the server", time(_total(record, "server_seconds"))),
        ("clients in the smallest sum", number(fewest) + invited),
    ]


def _protocol(record: RunRecord, found: Facts) -> Rows:
    """The parameters of a sum, each with its purpose."""
    clients, neighbours = number(found["clients"]), number(found["neighbours"])
    complete = found["neighbours"] >= found["clients"] - 1
    more = ", or more if more are drawn; if fewer are drawn, other clients send zeros" if record.draws_by_coins else ""
    if record.draws_by_coins and record.hides_cohort:
        more = " in every round: those that are not drawn send zeros"
    left = f"{_LEAST}: {number(found['least'])}"
    server, among = "is assumed to follow the protocol", _RING
    if found["active"]:
        server, among = "may lie: clients check what they receive, and sign it", _CHOSEN
    return [
        ("server", server),
        ("clients invited to a sum", f"{clients}{more}; {left}"),
        ("masks", f"shared with {'all ' if complete else ''}{neighbours} others{'' if complete else among}"),
        ("threshold", f"{number(found['threshold'])} of these others can open a client's masks together"),
        ("colluding among these others", _colluding(found)),
        ("sums lost by chance", _abort(found)),
        ("numbers in a sum", f"{found['bits']} bits each"),
    ]


def _colluding(found: Facts) -> str:
    """The colluding clients among those that share a client's masks, and the probability of more."""
    those = f"{_at_most(found['corrupt'])} of the {number(found['neighbours'])}, if as many collude in all as assumed"
    if not found["failure"]:
        return f"{those}; no probability of failure"
    return f"{those}, except with a probability of at most {power_of_two(found['failure'])} in each sum"


def _abort(found: Facts) -> str:
    if not found["abort"]:
        return "none, unless more clients vanish than planned for"
    return f"each with a probability of at most {power_of_two(found['abort'])}; also if more clients vanish than planned for"


def _each(amount: str, found: Facts | None) -> str:
    return f", about {amount} for each client and round" if found else ""


def _turns(record: RunRecord, found: Facts | None) -> int:
    """The number of invitations to a round, over all clients."""
    return max(1, len(record.rounds) * found["clients"]) if found else 1


def _total(record: RunRecord, name: str) -> float:
    return float(sum(row["masked"][name] for row in record.rounds))


def _at_most(count: int) -> str:
    return f"at most {number(count)}" if count else "none"


_TAKES = "Bytes count keys, shares of secrets, masked numbers, and the model on its way to the clients. Times exclude training."
_SIMULATED = "They are those of this simulation, in which one machine runs all clients in turn."
_DEPLOYED = (
    "The time of the server excludes waiting for clients. Bytes exclude the signatures of messages, and headers that the"
    " network adds."
)
_LOST = "Nothing of a lost round was applied, and its privacy charges stay."
_LEFT_OUT = "A client that dealt wrong shares was left out of all later rounds."
_LEFT_OUT_SECRETLY = (
    "A client that dealt wrong shares was left out of later rounds, but not after the run was resumed: its name is not"
    " recorded, because it would reveal who took part."
)
_BLAME = {
    "dealt wrong shares": "left out from then on. The blame is wrong only if many holders of its shares lied together",
    "opened wrong shares": "corrected. The blame is wrong only if the client that dealt them lied",
}
_LEAST = "fewest whose sum is unmasked"
_RING = ", on a ring in random order"
_CHOSEN = " on average: each client chooses its own"
_MISSING = (
    "The settings enable secure aggregation, but the run's files show none. Treat it as a run in which the server saw what"
    " every single client sent."
)
