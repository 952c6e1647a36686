"""The table of attacks and vantage points: each finding, or the reason why the attack does not apply."""

from __future__ import annotations

from collections.abc import Iterable

from attacks.evidence.main_attack import level
from attacks.report import significance
from attacks.report.audited import Audit, Cell, Named
from attacks.report.measured import measured
from attacks.report.sentences_texts import short
from attacks.report.wording import at_least
from secure_fed.report.formatting import MISSING, at_most, counted, duration, listed, percent
from secure_fed.report.formatting import number as shown
from secure_fed.report.page.markup import bullets, folded, paragraph, section, table, text

_NUMBERS_SHOWN = 3  # numbers shown for an attack that is not on membership
_WORDS = {
    "leak": "leak",
    "within": "within the guarantee",
    "beyond": "more than the guarantee allows",
    "sign": "weak sign",
    "inverted": "below chance",
    "chance": "not above chance",
}


def matrix(audit: Audit) -> str:
    """The table, how to read it, and every number behind it."""
    if not audit.attacks or not audit.vantages:
        return ""
    sees = (f"{vantage.title}: sees {vantage.about or 'an unknown part'}." for vantage in audit.vantages)
    return section(
        "The attacks requested, by every adversary" if audit.asked_for else "Every attack, by every adversary",
        _table(audit),
        folded(
            "How to read this table",
            paragraph(_READING),
            paragraph(_of_main(audit)),
            bullets((*sees, "Each adversary also sees what the adversaries above it see.")),
        ),
        _left_out(audit),
        folded("All numbers of every cell", _numbers(audit), _notes(audit)),
    )


def _of_main(audit: Audit) -> str:
    """The main attack, and its significance."""
    cell = audit.main_cell
    if cell is None:
        return ""
    others = significance.looks(audit) - 1
    rest = "" if not others else f"; {counted(others, 'other number')} share the rest of {audit.significance:g}"
    return (
        f"The main attack is {audit.attack_title(cell.attack)} ({audit.vantage_title(cell.vantage).lower()}). It was"
        " chosen before any score was seen, by what applies to this run. Its AUC is tested at a significance of"
        f" {level(audit.significance, others, main=True):g}{rest}."
    )


def _notes(audit: Audit) -> str:
    """The attacks' remarks on their own numbers."""
    return bullets(
        f"{audit.attack_title(cell.attack)}, {audit.vantage_title(cell.vantage)}: {cell.note}"
        for cell in audit.cells
        if cell.note
    )


def _table(audit: Audit) -> str:
    head = "".join(f'<th scope="col">{text(title)}</th>' for title in ("attack", *(v.title for v in audit.vantages)))
    body = "".join(_row(audit, attack) for attack in audit.attacks if not _nowhere(audit, attack))
    if not body:
        return ""
    return (
        f'<div class="scroll"><table class="matrix">\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{body}</tbody></table></div>\n"
    )


def _nowhere(audit: Audit, attack: Named) -> bool:
    """Whether no adversary could make the attack."""
    cells = [audit.cell(attack.name, vantage.name) for vantage in audit.vantages]
    return all(cell is not None and not cell.applicable for cell in cells)


def _left_out(audit: Audit) -> str:
    """The attacks that no adversary could make, with each adversary's reason; attacks with the same reasons are grouped."""
    titles: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for attack in audit.attacks:
        if _nowhere(audit, attack):
            titles.setdefault(_reasons(audit, attack), []).append(attack.title)
    lines = [f"{'; '.join(named)}. {_given(reasons)}" for reasons, named in titles.items()]
    return folded("Attacks that were not made on this run, and why", bullets(lines))


def _reasons(audit: Audit, attack: Named) -> tuple[tuple[str, str], ...]:
    """(adversaries, reason), the weakest first."""
    whose: dict[str, list[str]] = {}
    for vantage in audit.vantages:
        cell = audit.cell(attack.name, vantage.name)
        whose.setdefault((cell and cell.why) or "no reason is given", []).append(vantage.title)
    return tuple((listed(titles), why) for why, titles in whose.items())


def _given(reasons: tuple[tuple[str, str], ...]) -> str:
    if len(reasons) == 1:
        return f"All adversaries: {reasons[0][1]}."
    return " ".join(f"{titles}: {why}." for titles, why in reasons)


def _row(audit: Audit, attack: Named) -> str:
    paper = f"<small>{text(attack.about)}</small>" if attack.about else ""
    cells = "".join(_cell(audit, audit.cell(attack.name, vantage.name)) for vantage in audit.vantages)
    return f'<tr><th scope="row">{text(attack.title)}{paper}</th>{cells}</tr>\n'


def _cell(audit: Audit, cell: Cell | None) -> str:
    if cell is None:
        return _filled("none", "not tried")
    if not cell.applicable:
        return _filled("none", "does not apply", cell.why or "no reason is given")
    mark = significance.mark(cell, audit)
    if cell.auc is None:
        own = [f"{name} {value}" for name, value in measured(cell)[:_NUMBERS_SHOWN]]
        recovered = short(cell)
        css = {"leak": "leak", "part": "sign"}.get(mark, "own")
        return _filled(
            css, *(own or ("no number", cell.note or "no reason is given")), *([recovered] if recovered else [])
        )
    low, high = cell.interval or (None, None)
    between = f"{shown(low)} to {shown(high)}" if cell.interval else "no interval"
    few = mark in ("leak", "within", "beyond") and not significance.ranks_hold_up(cell, audit)
    word = f"{_WORDS[mark]}{_rarely(audit, cell)}" if few else _WORDS[mark]
    main = ["main attack"] if cell == audit.main_cell else []
    css = {"within": "own", "beyond": "sign"}.get(mark, mark)
    return _filled(css, f"{shown(cell.auc)}", between, *main, word)


def _rarely(audit: Audit, cell: Cell) -> str:
    """The significant true-positive rate of a finding whose AUC is not significant."""
    tail = next(tail for tail in cell.tails if significance.tail_holds_up(tail, cell, audit))
    return f": TPR {percent(tail.tpr)} at FPR {percent(tail.fpr)}"


def _filled(mark: str, first: str, *rest: str) -> str:
    lines = "".join(f"<small>{text(line)}</small>" for line in rest)
    return f'<td class="{mark}"><b>{text(first)}</b>{lines}</td>'


def _numbers(audit: Audit) -> str:
    head = (
        "attack",
        "adversary",
        "AUC",
        "TPR at FPR",
        "lower bound",
        "accounted",
        "units",
        "time",
        "also measured",
    )
    return table(head, (_numbers_of(audit, cell) for cell in audit.cells if cell.applicable))


def _numbers_of(audit: Audit, cell: Cell) -> tuple[str, ...]:
    between = "" if cell.interval is None else f" ({shown(cell.interval[0])} to {shown(cell.interval[1])})"
    bound = at_least(cell.lower) + (f" ({cell.how})" if cell.how and cell.lower is not None else "")
    return (
        audit.attack_title(cell.attack),
        audit.vantage_title(cell.vantage),
        f"{shown(cell.auc)}{between}",
        "; ".join(tails(cell)) or MISSING,
        bound,
        at_most(cell.accounted) if audit.comparable else MISSING,
        f"{shown(cell.members)} in, {shown(cell.non_members)} out",
        duration(cell.seconds),
        listed([f"{name} {value}" for name, value in measured(cell)]) or MISSING,
    )


def tails(cell: Cell) -> Iterable[str]:
    """Each true-positive rate with its interval and measured false-positive rate, or a note on too few non-members."""
    for tail in cell.tails:
        if tail.tpr is None:
            yield f"{100 * tail.target:g} %: refused, too few non-members"
            continue
        exactly = " exactly" if cell.known else _between(tail.fpr_interval)
        rate = f"measured FPR {percent(tail.fpr)}{exactly}"
        yield f"{100 * tail.target:g} %: TPR {percent(tail.tpr)}{_between(tail.tpr_interval)}, {rate}"


def _between(interval: tuple[float, float] | None) -> str:
    return "" if interval is None else f" ({percent(interval[0])} to {percent(interval[1])})"


_READING = (
    "Each number is the AUC: of all pairs of a member and a non-member, the share in which the attack ranks the member higher."
    " 0.5 is a coin, 1 is always right. Below it: its 95 % interval, not corrected for several attacks. The words are corrected"
    " for the number of attacks: luck alone causes any “leak” or “within the guarantee” in at most 5 % of audits. “Within the"
    " guarantee” means that the run's guarantee covers this adversary and allows as much. “Weak sign” means that only the"
    " interval is above 0.5. Where canaries pull along random directions, the distribution of non-members' scores is known,"
    " and the AUC is computed against it. Attacks on texts and labels show their own numbers: for texts the recall and"
    " precision of words, then of words with their positions. There “leak” means that more than half was recovered."
)
