"""An audit as one HTML file that opens from disk: first the finding in words, then all of its evidence.

The sections stand here in the order of the page: the verdict with its pictures, the table of attacks and vantage points, the
units and clients that stand out, the baseline, and the limits of an audit. Curves and lower bounds are in `curves`, runs side
by side in `sweep`. A section is empty if the audit has no data for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path

from attacks.evidence.attempts import measured
from attacks.evidence.verdict import allows, contradicts, in_short, level, looks, mark, ranks_hold_up, tail_holds_up
from attacks.record import Audit, Cell, Exposed
from attacks.report import curves, sweep
from attacks.report.phrases import (
    MARKS,
    NAMES,
    ONE_IN,
    allowed_auc,
    apart,
    at_least,
    capital,
    confidence,
    ends,
    estimates,
    promised,
    sides,
    unit_one,
    units,
    who,
)
from attacks.report.sentences import blunt, finding, headline, how_to_read, short, tried_by_name, untried
from secure_fed.report import markup
from secure_fed.report.formatting import MISSING, at_most, counted, duration, listed, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.guarantee import PRESENCE, limit
from secure_fed.report.markup import Bar, bullets, facts, figure, figures, folded, paragraph, section, table, text
from secure_fed.report.measured import too_few
from secure_fed.report.page import document
from secure_fed.runs.durable import atomic_write


def write(audit: Audit, path: Path) -> Path:
    """Write the page of an audit to `path`, whole or not at all, and return it."""
    atomic_write(path, page(audit), private=True)
    return path


def page(audit: Audit) -> str:
    """The whole HTML document; equal audits give equal bytes."""
    sections = (
        first_screen(audit),
        matrix(audit),
        curves.roc_curves(audit),
        curves.bounds(audit),
        sweep.sweep(audit),
        clients(audit),
        examples(audit),
        baseline(audit),
        not_proved(audit),
        how(audit),
        section("The verdict for the record", paragraph(audit.verdict.text, "recorded")),
    )
    style = resources.files(__package__).joinpath("audit.css").read_text(encoding="utf-8")
    return document(f"{name(audit)}: audit", "".join(sections), style)


def name(audit: Audit) -> str:
    """The run's name, without its folders."""
    return (audit.run_dir or "").replace("\\", "/").rstrip("/").rpartition("/")[2] or "a run without a name"


def first_screen(audit: Audit) -> str:
    """The verdict in one sentence, the pictures of epsilon and of the attack, then the finding in words and the key figures."""
    css = "privacy" if in_short(audit) in ("none_found", "within") else "privacy warning"
    rest = "".join(paragraph(one) for one in (blunt(audit), untried(audit)) if one)
    key = (
        (f"{units(audit)} {' and '.join(sides(audit))}", f"{shown(audit.members)} and {shown(audit.non_members)}"),
        ("accuracy of the model", percent(audit.accuracy)),
        *_main_figures(audit),
        ("epsilon accounted", promised(audit)),
        ("epsilon, lower bound", at_least(audit.lower)),
    )
    return (
        f'<header>\n<p class="kind">Privacy audit</p>\n<h1>{text(name(audit))}</h1>\n</header>\n'
        + section(headline(audit), paragraph(_promised_and_found(audit)), rest, css_class=css)
        + section(
            "The evidence",
            figures(_epsilons(audit), curves.first_curve(audit)),
            paragraph(audit.verdict.summary.removeprefix(f"{finding(audit)}.").strip(), "lead"),
            facts(key, "key"),
            paragraph(reading, "after") if (reading := how_to_read(audit)) else "",
        )
    )


def _epsilons(audit: Audit) -> str:
    """The guarantee's epsilon, the lower bound and the estimates on one scale, with what each means for a guess."""
    cell = next(iter(audit.bounded), None)
    lower, by = audit.lower, ""
    if lower and cell is not None:
        by = f"Lower bar: the attack “{audit.attack_title(cell.attack)}”, by {who(audit, cell.vantage)}. "
    unproven = [
        Bar(f"Estimate, {name}", epsilon, f"ε ≥ {at_least(epsilon)}", "--second", hollow=True)
        for name, epsilon in ((NAMES.get(one.name, one.name), one.epsilon) for one in estimates(audit))
    ]
    by_audit = Bar("Shown by the audit", lower, f"ε ≥ {_apart(audit)[1]}" if lower else "nothing", "--second")
    drawn = markup.limits("epsilon allowed and epsilon shown", (_guarantee(audit), by_audit, *unproven))
    return figure("Epsilon, allowed and shown", drawn, f"{by}{_AXIS}{_OUTLINES if unproven else ''}")


_ALLOWED = "Allowed by the guarantee"


def _guarantee(audit: Audit) -> Bar:
    """The guaranteed epsilon to compare with; without a bar if no epsilon is comparable."""
    cell = next(iter(audit.bounded), None)
    if not audit.guaranteed:
        return Bar("Allowed, without a guarantee", math.inf, "no limit")
    if not audit.comparable:
        return Bar(_ALLOWED, None, "not comparable" if audit.protected else promised(audit))
    accounted = audit.epsilon_accounted if cell is None else cell.epsilon_accounted
    if accounted is None:
        return Bar(_ALLOWED, math.inf, "no limit against this adversary")
    if cell is not None and contradicts(cell, audit):
        return Bar(_ALLOWED, accounted, f"ε ≤ {_apart(audit)[0]}")
    most = None if cell is None else allows(cell, audit)
    if most is not None and most.by == "mechanism":
        return Bar(_ALLOWED, accounted, f"ε ≤ {at_most(accounted)}, AUC ≤ {allowed_auc(most.auc)}")
    return Bar(_ALLOWED, accounted, limit(accounted, audit.delta or 0.0))


def _apart(audit: Audit) -> tuple[str, str]:
    """The guaranteed epsilon and the largest lower bound in words, with enough digits to show a contradiction."""
    cell = next(iter(audit.bounded), None)
    if cell is not None and contradicts(cell, audit):
        return apart(cell.epsilon_accounted or 0.0, cell.epsilon_lower or 0.0)
    return at_most(audit.epsilon_accounted), at_least(audit.lower)


def _main_figures(audit: Audit) -> list[tuple[str, str]]:
    """The main attack's AUC, and the AUC that a run with exactly this guarantee may show."""
    cell = audit.main_cell
    if cell is None:
        return []
    most = allows(cell, audit)
    rows = [(f"AUC of {audit.attack_title(cell.attack)}", f"{shown(cell.auc)}{ends(cell.auc_interval)}")]
    if most is not None:
        whose = "this run's noise allows" if most.by == "mechanism" else "epsilon and delta alone allow"
        rows.append((f"AUC that {whose}", allowed_auc(most.auc)))
    return rows


def _promised_and_found(audit: Audit) -> str:
    """The run's guarantee and the audit's finding, in two sentences."""
    made = "No attack that was tried" if tried_by_name(audit) else "No attack"
    untested = ""  # the epsilon of a guarantee whose neighbouring data sets differ from the audit's
    if audit.epsilon_promised is not None:
        differ = audit.adjacency or "something else"
        untested = f", epsilon {at_most(audit.epsilon_promised)} for neighbours that differ by {differ}"
    lower, (allowed, least) = audit.lower, _apart(audit)
    promise = (
        f"The run promises at most epsilon {allowed} for {unit_one(audit.unit)}"
        f"{'' if audit.delta is None else f', at delta {audit.delta:g}'}."
        if audit.protected
        else "The run promises no epsilon."
        if not audit.guaranteed
        else f"The run's guarantee is for {unit_one(audit.unit)}{untested}; it has no epsilon that an audit can test."
    )
    found = (
        f"The audit shows that epsilon is at least {least} for {unit_one(audit.audited_unit)}, with a confidence of"
        f" {confidence(audit)}."
        if lower
        else f"{made} proves an epsilon above 0: the lower bound on it is 0."
        if lower is not None
        else "The audit gave no lower bound on it."
    )
    return f"{promise} {found}"


_AXIS = (
    "Axis: epsilon; below it, the largest share of right guesses that epsilon alone allows, whatever the noise, on whether a"
    f" unit's data were used in the training, if yes and no are equally likely; at random 50 %. {PRESENCE}"
)
_OUTLINES = " Outlined bars are estimates, which assume more and prove nothing."
_NUMBERS_SHOWN = 3  # numbers shown for an attack that is not on membership


def matrix(audit: Audit) -> str:
    """The table, how to read it, and every number behind it."""
    if not audit.attacks or not audit.vantages:
        return ""
    sees = (f"{vantage.title}: sees {vantage.sees}." for vantage in audit.vantages)
    cell, chosen = audit.main_cell, ""
    if cell is not None:
        others = looks(audit) - 1
        rest = "" if not others else f"; {counted(others, 'other number')} share the rest of {audit.significance:g}"
        chosen = (
            f"The main attack is {audit.attack_title(cell.attack)} ({audit.vantage_title(cell.vantage).lower()}). It was"
            " chosen before any score was seen, by what applies to this run. Its AUC is tested at a significance of"
            f" {level(audit.significance, others, main=True):g}{rest}."
        )
    notes = (  # the attacks' remarks on their own numbers
        f"{audit.attack_title(one.attack)}, {audit.vantage_title(one.vantage)}: {one.note}"
        for one in audit.cells
        if one.note
    )
    return section(
        "The attacks requested, by every adversary" if audit.asked_for else "Every attack, by every adversary",
        _table(audit),
        folded(
            "How to read this table",
            paragraph(_READING),
            paragraph(chosen),
            bullets((*sees, "Each adversary also sees what the adversaries above it see.")),
        ),
        _left_out(audit),
        folded("All numbers of every cell", _numbers(audit), bullets(notes)),
    )


def _table(audit: Audit) -> str:
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in ("attack", *(v.title for v in audit.vantages)))
    rows = []
    for attack in audit.attacks:
        if not audit.applies_nowhere(attack.name):
            paper = f"<small>{text(attack.paper)}</small>" if attack.paper else ""
            cells = "".join(_cell(audit, audit.cell(attack.name, vantage.name)) for vantage in audit.vantages)
            rows.append(f'<tr><th scope="row">{text(attack.title)}{paper}</th>{cells}</tr>\n')
    if not rows:
        return ""
    return (
        f'<div class="scroll"><table class="matrix">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{''.join(rows)}</tbody></table></div>\n"
    )


def _cell(audit: Audit, cell: Cell | None) -> str:
    if cell is None:
        return _filled("none", "not tried")
    if not cell.applicable:
        return _filled("none", "does not apply", cell.why or "no reason is given")
    marked = mark(cell, audit)
    if cell.auc is None:
        own = [f"{name} {value}" for name, value in measured(cell)[:_NUMBERS_SHOWN]]
        recovered = short(cell)
        css = {"leak": "leak", "part": "sign"}.get(marked, "own")
        return _filled(
            css, *(own or ("no number", cell.note or "no reason is given")), *([recovered] if recovered else [])
        )
    between = " to ".join(map(shown, cell.auc_interval or ())) or "no interval"
    _, word = MARKS[marked]
    if marked in ("leak", "within", "beyond") and not ranks_hold_up(cell, audit):
        tail = next(tail for tail in cell.tails if tail_holds_up(tail, cell, audit))
        word += f": TPR {percent(tail.tpr)} at FPR {percent(tail.fpr)}"
    main = ["main attack"] if cell == audit.main_cell else []
    css = {"within": "own", "beyond": "sign"}.get(marked, marked)
    return _filled(css, f"{shown(cell.auc)}", between, *main, word)


def _filled(mark: str, first: str, *rest: str) -> str:
    lines = "".join(f"<small>{text(line)}</small>" for line in rest)
    return f'<td class="{mark}"><b>{text(first)}</b>{lines}</td>'


def _left_out(audit: Audit) -> str:
    """The attacks that no adversary could make, with each adversary's reason; attacks with the same reasons are grouped."""
    titles: dict[str, list[str]] = {}
    for attack in audit.attacks:
        if audit.applies_nowhere(attack.name):
            whose: dict[str, list[str]] = {}  # the adversaries of each reason, the weakest first
            for vantage in audit.vantages:
                cell = audit.cell(attack.name, vantage.name)
                whose.setdefault((cell and cell.why) or "no reason is given", []).append(vantage.title)
            reasons = [f"{listed(adversaries)}: {why}." for why, adversaries in whose.items()]
            if len(whose) == 1:
                reasons = [f"All adversaries: {why}." for why in whose]
            titles.setdefault(" ".join(reasons), []).append(attack.title)
    lines = [f"{'; '.join(named)}. {reasons}" for reasons, named in titles.items()]
    return folded("Attacks that were not made on this run, and why", bullets(lines))


def _numbers(audit: Audit) -> str:
    head = ("attack", "adversary", "AUC", "TPR at FPR", "lower bound", "accounted", "units", "time", "also measured")
    rows = (
        (
            audit.attack_title(cell.attack),
            audit.vantage_title(cell.vantage),
            f"{shown(cell.auc)}{ends(cell.auc_interval)}",
            "; ".join(tails(cell)) or MISSING,
            at_least(cell.epsilon_lower)
            + (f" ({cell.epsilon_how})" if cell.epsilon_how and cell.epsilon_lower is not None else ""),
            at_most(cell.epsilon_accounted) if audit.comparable else MISSING,
            _sizes(audit, cell),
            duration(cell.seconds),
            listed([f"{name} {value}" for name, value in measured(cell)]) or MISSING,
        )
        for cell in audit.cells
        if cell.applicable
    )
    return table(head, rows)


def _sizes(audit: Audit, cell: Cell) -> str:
    """The cell's units; the audit's, for an attack that ranks none."""
    ranked: Audit | Cell = audit if cell.members is None else cell
    return f"{shown(ranked.members)} in, {shown(ranked.non_members)} out"


def tails(cell: Cell) -> Iterable[str]:
    """Each true-positive rate with its interval and measured false-positive rate, or a note on too few non-members."""
    for tail in cell.tails:
        if tail.tpr is None:
            yield f"{100 * tail.target:g} %: not stated, {shown(cell.non_members)} are {too_few(tail.target)}"
            continue
        exactly = " exactly" if cell.known else ends(tail.fpr_interval, percent)
        rate = f"measured FPR {percent(tail.fpr)}{exactly}"
        yield f"{100 * tail.target:g} %: TPR {percent(tail.tpr)}{ends(tail.tpr_interval, percent)}, {rate}"


_READING = (
    "Each number is the AUC: of all pairs of a member and a non-member, the share in which the attack ranks the member higher."
    " 0.5 is chance, 1 is always right. Below it: its 95 % interval, not corrected for several attacks. The words are corrected"
    " for the number of attacks: luck alone causes any “leak” or “within the guarantee” in at most 5 % of audits. “Within the"
    " guarantee” means that the run's guarantee covers this adversary and allows as much. “Weak sign” means that only the"
    " interval is above 0.5. Where canaries pull along random directions, the distribution of non-members' scores is known,"
    " and the AUC is computed against it. Attacks on texts and labels show their own numbers: for texts the recall and"
    " precision of words, then of words with their positions. There “leak” means that more than half was recovered."
)
_FIRST = 10  # rows of a long list; the rest opens on a click


def clients(audit: Audit) -> str:
    """Clients by the scores of their members, beside the scores of their held-out units."""
    if not audit.clients:
        return ""
    head = ("rank", "client", "in training", "score in training", "held out", "score held out")
    rows = [
        (str(rank), one.client, shown(one.units), shown(one.score), shown(one.held_out), shown(one.score_held_out))
        for rank, one in enumerate(audit.clients, start=1)
    ]
    return section("Clients, most exposed first", paragraph(_CLIENTS), *_long(head, rows, "client"))


def examples(audit: Audit) -> str:
    """Units by score, with their texts if the audit contains them."""
    if not audit.exposed:
        return ""
    ordered = sorted(audit.exposed, key=lambda one: one.rank)
    texts = any(one.text for one in ordered)
    sides = (
        ("others with a lower score", "contributed")
        if audit.dummies
        else ("held out, with a lower score", "in training")
    )
    head = ("rank", "unit", "score", *sides, *(("text",) if texts else ()))
    rows = [(*_unit(one), *((one.text or "not shown",) if texts else ())) for one in ordered]
    lead = ""
    if audit.accusations:
        did = "contributed" if audit.dummies else "trained"
        counts = [f"of the first {one.first}, {one.false or 'none'} had not {did}" for one in audit.accusations]
        share = percent(audit.non_members / (audit.members + audit.non_members))
        lead = paragraph(f"{capital('; '.join(counts))}. Of units drawn at random {share} had not.", "lead")
    return section(
        f"The {units(audit)} that stand out most",
        lead,
        paragraph(_SHOWN if texts else _REDACTED, "notice" if texts else ""),
        *_long(head, rows, "unit"),
    )


def _unit(one: Exposed) -> tuple[str, ...]:
    member = "yes" if one.member else "no: a false accusation"
    return shown(one.rank), one.unit, shown(one.score), percent(one.share_below), member


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


def baseline(audit: Audit) -> str:
    """The baseline: whether members and non-members differ without any model, which makes all AUCs void."""
    found = audit.baseline
    about = f"AUC {shown(found.auc)}{ends(found.auc_interval)}"
    title = "Without any model"
    if audit.dummies:
        return section(title, paragraph(_NO_TEXTS))
    if found.at_chance is None:
        return section(title, paragraph(_UNCHECKED.format(why=f" ({found.why})" if found.why else ""), "notice"))
    if found.at_chance:
        return section(title, paragraph(f"{_WHAT} It is at chance: {about}. {_FAIR}"))
    return section(
        title, paragraph(f"THIS AUDIT OF MEMBERSHIP IS VOID. {_WHAT} It is not at chance: {about}. {_UNFAIR}", "loud")
    )


def not_proved(audit: Audit) -> str:
    """Conclusions that this page does not support."""
    return section(
        "What an audit does not prove",
        bullets(
            (
                "Finding nothing does not show that there is no leak: an attack gives a lower bound on a leak, never an"
                " upper bound. Only the accounting of a guarantee gives an upper bound.",
                "An AUC below 0.5, or an attack that is weak on this run, is not privacy.",
                "A leak that stays below the accounted epsilon does not contradict the guarantee: a guarantee limits leaks,"
                " it does not rule them out.",
                f"The audit is about {unit_one(audit.audited_unit)}. A person or a client with several may be exposed more.",
                "The audit is about this run. Another seed, other data or more rounds may give away more.",
            )
        ),
    )


def how(audit: Audit) -> str:
    """The experiment: random choice, unit, significance, and the papers of the attacks."""
    rows = (
        ("unit", unit_one(audit.audited_unit)),
        (f"{units(audit)} " + " and ".join(sides(audit)), f"{shown(audit.members)} and {shown(audit.non_members)}"),
        ("significance of all findings, together", f"{audit.significance:g}"),
        ("significance of all lower bounds, together", f"{audit.significance:g}"),
        ("numbers tested", shown(looks(audit))),
        ("delta of lower bounds", f"{audit.delta or 0.0:g}"),
    )
    papers = ((attack.title, attack.paper or MISSING) for attack in audit.attacks)
    return section(
        "How it was measured",
        facts(rows),
        folded(
            "The experiment",
            paragraph(f"{(_PULLED if audit.dummies else _TRAINED).format(units=units(audit))} {_TESTED}"),
        ),
        folded("Attacks and where they come from", table(("attack", "paper"), papers)) if audit.attacks else "",
    )


_TRAINED = (
    "Before training, some {units} were chosen at random, and about half of them, again at random, were left out of it."
    " So members and non-members differ only in that."
)
_PULLED = (
    "The audited {units} hold nobody's data and exist for the audit alone. About half of them, chosen at random, contributed a"
    " random direction of their own, as long as a unit of the data may; the others sent zeros. So members and non-members"
    " differ only in that."
)
_TESTED = (
    "No attack sees who was chosen; its scores are compared with that afterwards. Each interval has a confidence of 95 %,"
    " by itself. The significance is corrected for the number of attacks: the AUC of the main attack is tested at four fifths"
    " of it; the other numbers share the rest, or all of it once the main AUC is significant."
)
_NO_TEXTS = (
    "Dummy units have no texts, and which of them contributed was chosen independently of everything else. So only the run can"
    " distinguish them from the others."
)
_WHAT = "A classifier without access to the model tried to distinguish members from non-members by their texts alone."
_FAIR = "So the findings of the attacks come from the model."
_UNFAIR = (
    "Members and non-members differ without the model, so no AUC above says anything about the model. Luck causes that in"
    f" one audit in {ONE_IN}: repeat run and audit with another seed; if it happens again, check how they were divided."
    " A lower bound on epsilon needs only that members were chosen at random, and then stands. Recovered texts do not need it."
)
_UNCHECKED = (
    "It was not checked whether members and non-members differ by their texts alone{why}. Until then a finding may be a"
    " difference of the texts, not a leak of the model."
)
