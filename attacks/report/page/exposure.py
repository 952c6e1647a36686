"""The most exposed clients and units. Texts appear only if the audit was run with --show-texts."""

from __future__ import annotations

from collections.abc import Sequence

from attacks.report.audited import Audit
from attacks.report.values import Row, count, number, words
from attacks.report.wording import capital, units
from secure_fed.report.formatting import MISSING, counted, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.page.markup import folded, paragraph, section, table

_FIRST = 10  # rows of a long list; the rest opens on a click


def clients(audit: Audit) -> str:
    """Clients by the scores of their members, beside the scores of their held-out units."""
    if not audit.clients:
        return ""
    head = ("rank", "client", "in training", "score in training", "held out", "score held out")
    rows = [
        (
            str(rank),
            words(one.get("client")) or MISSING,
            shown(count(one.get("units"))),
            shown(number(one.get("score"))),
            shown(count(one.get("held_out"))),
            shown(number(one.get("score_held_out"))),
        )
        for rank, one in enumerate(audit.clients, start=1)
    ]
    return section("Clients, most exposed first", paragraph(_CLIENTS), *_long(head, rows, "client"))


def examples(audit: Audit) -> str:
    """Units by score, with their texts if the audit contains them."""
    if not audit.exposed:
        return ""
    ordered = sorted(audit.exposed, key=lambda one: number(one.get("rank")) or float("inf"))
    texts = any(words(one.get("text")) for one in ordered)
    sides = (
        ("others with a lower score", "contributed")
        if audit.phantoms
        else ("held out, with a lower score", "in training")
    )
    head = ("rank", "unit", "score", *sides, *(("text",) if texts else ()))
    rows = [(*_unit(one), *((words(one.get("text")) or "not shown",) if texts else ())) for one in ordered]
    return section(
        f"The {units(audit)} that stand out most",
        paragraph(_false(audit), "lead") if audit.accusations else "",
        paragraph(_SHOWN if texts else _REDACTED, "notice" if texts else ""),
        *_long(head, rows, "unit"),
    )


def _false(audit: Audit) -> str:
    """The number of false accusations among the highest-ranked units, in one line."""
    did = "contributed" if audit.phantoms else "trained"
    pairs = [(count(one.get("first")), count(one.get("false"))) for one in audit.accusations]
    counts = [
        f"of the first {first}, {wrong or 'none'} had not {did}"
        for first, wrong in pairs
        if first and wrong is not None
    ]
    pool = (audit.members or 0) + (audit.non_members or 0)
    if not counts or not pool:
        return ""
    return f"{capital('; '.join(counts))}. Of units drawn at random {percent((audit.non_members or 0) / pool)} had not."


def _unit(one: Row) -> tuple[str, ...]:
    member = (
        {True: "yes", False: "no: a false accusation"}[one["member"]]
        if isinstance(one.get("member"), bool)
        else MISSING
    )
    rank, share = count(one.get("rank")), number(one.get("share_below"))
    return shown(rank), words(one.get("unit")) or MISSING, shown(number(one.get("score"))), percent(share), member


def _long(head: Sequence[str], rows: Sequence[Sequence[str]], name: str) -> tuple[str, str]:
    first, rest = rows[:_FIRST], rows[_FIRST:]
    more = counted(len(rest), f"more {name}", f"more {name}s")
    return table(head, first), folded(more, table(head, rest)) if rest else ""


_CLIENTS = (
    "The score of a client is the share of all held-out units that the main attack ranks below the client's own; 0.5 is"
    " chance. Where a client's held-out units score as high as its members, the cause is its way of writing and not the"
    " training. With few units a score is mostly luck: it says where to look first, not who was harmed."
)
_REDACTED = (
    "Members and non-members alike, by the score of the main attack. Their content is not shown. But the page says which"
    " units were trained on: it is only for readers who may know that."
)
_SHOWN = "This page contains texts of the clients' data, as requested: treat it as you treat the data."
