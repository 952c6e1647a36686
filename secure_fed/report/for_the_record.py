"""What a record of the processing needs of a run: who ran it, why, when, on what, what it cost; the guarantee, word for word.

unguarded    the copies in the private part that neither noise nor masks protect, and the command that deletes them
record_of    who answers for the run, its origin, the versions and digests of its files, the budget, the accuracy
statement    the guarantee in the words of the result, and every term that it rests on

A field that nobody filled says so. The page that may be passed on has what the people whose data were used have a right to be
told (operator, purpose, legal basis, recipients, retention). It leaves out where and when the run was made and on which data:
dates would reveal how long rounds took, and so how many clients trained.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import asdict

from privacy.statement import OBSERVERS, SEES_COHORTS
from secure_fed.report.formatting import MISSING, at_most, number, percent, rate
from secure_fed.report.guarantee import SIMULATED, Guarantee, stated
from secure_fed.report.markup import bullets, facts, paragraph, section
from secure_fed.report.masks import Facts, Rows
from secure_fed.report.record import RunRecord
from secure_fed.runs.directory import CHECKPOINT, PRIVATE, RECORDING, REPORT, RESULT, UNPROTECTED

NOT_STATED = "not stated"


def unguarded(record: RunRecord) -> str:
    """The unprotected copies in the run's folder, who can read them, and how to delete them; empty where there are none."""
    if not record.unguarded:
        return ""
    folder = str((record.result or {}).get("run_dir") or record.name)
    paths = [f"{folder}/{PRIVATE}/{name}" for name in record.unguarded]
    return section(
        "Copies without any protection",
        paragraph(_UNGUARDED, "notice"),
        bullets(f"{PRIVATE}/{name}: {_HOLDS[name]}" for name in record.unguarded),
        paragraph(f"They exist for the audit alone. Once it is made, delete them: rm -r {shlex.join(paths)}"),
        css_class="privacy warning",
    )


def record_of(record: RunRecord) -> str:
    """Everything that a record of the processing needs beside the guarantee."""
    rows = [*_answers_for_it(record), *(_made(record) if record.owned else ()), *_measured(record)]
    left_out = "" if record.owned else paragraph(_LEFT_OUT)
    return section("For the record", facts(rows, "terms"), left_out)


def _answers_for_it(record: RunRecord) -> Iterator[tuple[str, str]]:
    names = {"reason": "why this epsilon" if record.private else "why no epsilon"}
    for name, said in asdict(record.config.record).items():
        if record.owned or name != "site":
            yield names.get(name, name.replace("_", " ")), said or NOT_STATED


def _made(record: RunRecord) -> Iterator[tuple[str, str]]:
    """When, where and on what the run was made."""
    origin, ended = record.facts.get("origin") or {}, record.facts.get("ended")
    divided = record.facts.get("partition") or {}
    digest = divided.get("digest") or record.facts.get("data_digest") or record.facts.get("examples_digest")
    yield "began", str(origin.get("began") or NOT_STATED)
    yield "ended", str((ended if record.result else "not finished") or NOT_STATED)
    yield "machine", str(origin.get("machine") or NOT_STATED)
    yield "commit of secure-fed", str(origin.get("commit") or "not stated: it was not run from a git checkout")
    yield "version of the data", f"{digest} (a digest under this run's key)" if digest else NOT_STATED
    for what, name in (("model", CHECKPOINT), ("result", RESULT), ("report that may be passed on", REPORT)):
        if name in record.digests:
            yield f"SHA-256 of the {what} ({name})", record.digests[name]


def _measured(record: RunRecord) -> Iterator[tuple[str, str]]:
    """The accuracy with its interval, and the budget."""
    if record.last("accuracy") is not None and not record.withholds_test:
        yield "accuracy", accuracy(record)
    guarantee = stated(record)
    if guarantee is not None and record.result is not None:
        terms = guarantee.terms
        total = terms["budget_epsilon"]
        own = f"{at_most(guarantee.epsilon)} at delta {guarantee.delta:g}" if guarantee.holds else "void"
        yield "epsilon of this run", own
        spent = f"of which {at_most(record.result['epsilon_cumulative'])} was spent when this run ended"
        limit = "without a limit" if total is None else f"epsilon {at_most(total)} at delta {terms['budget_delta']:g}"
        yield "the budget's total" if record.config.privacy.ledger else "this run's own budget", f"{limit}, {spent}"


def accuracy(record: RunRecord) -> str:
    """The accuracy with Clopper and Pearson's 95 % interval, if it is a share of independent test examples."""
    from secure_fed.runs.roc import exact_rate

    found, rows = record.last("accuracy"), ((record.result or record.facts).get("test") or {}).get("rows")
    if found is None or not rows or record.config.data.task not in _OF_EXAMPLES:
        return percent(found) + ("; no interval: held-out rows are not counted" if record.private and not rows else "")
    exact = exact_rate(round(found * rows), rows)
    return f"{percent(found)}; 95 % interval {percent(exact.low)} to {percent(exact.high)}, of {number(rows)} test examples"


def statement(record: RunRecord) -> str:
    """The recorded statement, whole, and its terms as a table; empty where the run recorded none."""
    guarantee, simulated = stated(record), "" if record.deployed else f"{SIMULATED} "
    recorded = guarantee.text if guarantee else (record.result or {}).get("privacy_statement")
    void = guarantee is not None and not guarantee.holds
    return section(
        "Statement for the record",
        paragraph("This is no guarantee: the run is NOT PRIVATE.", "notice") if void else "",
        paragraph(f"{simulated}{recorded}", "recorded") if recorded else "",
        facts(_terms(record, guarantee), "terms") if guarantee else "",
    )


def _terms(record: RunRecord, guarantee: Guarantee) -> Rows:
    """Everything needed to check the guarantee, or to doubt it."""
    terms = guarantee.terms
    return [
        ("unit", terms["unit"]),
        ("neighbours", terms["adjacency"]),
        ("epsilon", at_most(guarantee.epsilon)),
        *_against(guarantee),
        ("delta", f"{guarantee.delta:g} (1 in {number(round(1 / guarantee.delta))})"),
        ("mechanism", terms["mechanism"]),
        ("clip norm", f"{terms['clip_norm']:g}"),
        ("noise is added", terms["noise"]),
        *_realised(terms),
        ("sampling", terms["sampling"]),
        ("accountant", terms["accountant"]),
        ("trusted", terms["trust"]),
        ("released", terms["released"]),
        *_spending(record, guarantee),
    ]


def _against(guarantee: Guarantee) -> Rows:
    """The observers that epsilon holds against, and the second epsilon where the first does not hold against other clients."""
    those = guarantee.terms.get("holds_against", ("reader",))
    held = [("epsilon holds against", ", ".join(OBSERVERS[one] for one in those))]
    if "participant" in those:
        return held
    seen = at_most(guarantee.epsilon_participants)
    return [*held, ("epsilon against the other clients", f"{seen}; it holds against {SEES_COHORTS}")]


def _realised(terms: Facts) -> Rows:
    """The noise that the surviving clients actually added, where clients add it. The guarantee does not rely on it."""
    found = terms.get("realised")
    if not found:
        return []
    smallest = (
        f"multiplier {rate(found['noise_multiplier'])} in the smallest sum, of {number(found['survivors'])} clients"
    )
    would_be = f"that would be epsilon {at_most(found['epsilon'])}, but the guarantee does not count on it"
    return [("noise as realised", f"{smallest}; {would_be}")]


def _spending(record: RunRecord, guarantee: Guarantee) -> Rows:
    """The charges and their ledger, once there is a result."""
    shared = record.config.privacy.ledger
    if record.result is None:
        return [("ledger", shared or _OWN)]
    terms, most = guarantee.terms, guarantee.terms["participations"]
    return [
        ("releases", releases(record.result["releases"], terms)),
        *([("rounds of one client", f"at most {number(most)}")] if most else []),
        ("ledger", str(terms["ledger"]) if shared else _OWN),
        *([("data set of the ledger", str(terms["data_set"]) or MISSING)] if shared else []),
    ]


def releases(charged: int, terms: Facts) -> str:
    """What the number of releases means: how many noised sums, or noised messages of one client, the epsilon pays for."""
    planned, of_sums = terms["planned_releases"], terms["place"] in ("sum", "shares")
    what = "noised sums" if of_sums else "noised steps or updates of one client"
    again = ", repeated ones included" if charged > planned else ""
    return f"this epsilon pays for all {number(planned)} planned {what}; {number(charged)} were made{again}"


_OF_EXAMPLES = ("classification", "multi_label", "multiple_choice")  # whose accuracy is a share of the test examples
_OWN = "none is named: the run has a budget of its own, which counts no other run"
_UNGUARDED = (
    "Neither noise nor masks protect these copies, and no guarantee covers them: treat them as the training data themselves."
    " Whoever is logged in as the owner of the run's folder, or administers the machine, can read them; nobody else can."
)
_HOLDS = {
    UNPROTECTED: "a second model, trained on the same data without any protection, with its own recordings, for comparison",
    RECORDING: "what clients sent in single rounds, or their sums, as the audit's attacks read them",
}
_LEFT_OUT = (
    "Site, dates, machine, commit and digests of the data are on the owner's report and not on this page: dates would reveal"
    " how long rounds took, and so how many clients trained."
)
