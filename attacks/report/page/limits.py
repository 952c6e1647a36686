"""The sections on the assumptions and limits of an audit: the baseline, the experiment, and unsupported conclusions."""

from __future__ import annotations

from attacks.report.audited import Audit
from attacks.report.sentences_guarantee import ONE_IN
from attacks.report.significance import looks
from attacks.report.wording import sides, unit_one, units
from secure_fed.report.formatting import MISSING
from secure_fed.report.formatting import number as shown
from secure_fed.report.page.markup import bullets, facts, folded, paragraph, section, table


def baseline(audit: Audit) -> str:
    """The baseline: whether members and non-members differ without any model, which makes all AUCs void."""
    found = audit.baseline
    about = f"AUC {shown(found.auc)}"
    if found.interval is not None:
        about += f" ({shown(found.interval[0])} to {shown(found.interval[1])})"
    title = "Without any model"
    if audit.phantoms:
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
                f"The audit is about {unit_one(audit.audited)}. A person or a client with several may be exposed more.",
                "The audit is about this run. Another seed, other data or more rounds may give away more.",
            )
        ),
    )


def how(audit: Audit) -> str:
    """The experiment: coins, unit, significance, and the papers of the attacks."""
    rows = (
        ("unit", unit_one(audit.audited)),
        (f"{units(audit)} " + " and ".join(sides(audit)), f"{shown(audit.members)} and {shown(audit.non_members)}"),
        ("significance of all findings, together", f"{audit.significance:g}"),
        ("significance of all lower bounds, together", f"{audit.significance:g}"),
        ("numbers tested", shown(looks(audit))),
        ("delta of lower bounds", f"{audit.delta or 0.0:g}"),
    )
    papers = ((attack.title, attack.about or MISSING) for attack in audit.attacks)
    return section(
        "How it was measured",
        facts(rows),
        folded(
            "The experiment",
            paragraph(f"{_PULLED if audit.phantoms else _TRAINED.format(units=units(audit))} {_TESTED}"),
        ),
        folded("Attacks and where they come from", table(("attack", "paper"), papers)) if audit.attacks else "",
    )


_TRAINED = (
    "Before training, some {units} were chosen at random, and a fair coin decided for each whether it trained or was left out."
    " So members and non-members differ only in that."
)
_PULLED = (
    "Phantoms are audited units that are nobody's data. A fair coin decided for each whether it contributed a random"
    " direction of its own, as long as a unit of the data may, or zeros. So members and non-members differ only"
    " in that."
)
_TESTED = (
    "No attack sees the coins; its scores are compared with them afterwards. Each interval has a confidence of 95 %, by itself."
    " The significance is corrected for the number of attacks: the AUC of the main attack is tested at four fifths of it; the"
    " other numbers share the rest, or all of it once the main AUC is significant."
)
_NO_TEXTS = (
    "Phantoms have no texts, and their coins are independent of everything else. So only the run can distinguish"
    " phantoms that contributed from the others."
)
_WHAT = "A classifier without access to the model tried to distinguish members from non-members by their texts alone."
_FAIR = "So the findings of the attacks come from the model."
_UNFAIR = (
    "Members and non-members differ without the model, so no AUC above says anything about the model. Fair coins cause that by"
    f" luck in one audit in {ONE_IN}: repeat run and audit with another seed; if it happens again, check how they were divided."
    " A lower bound on epsilon rests on the coins alone, and stands if they were fair. Recovered texts do not rest on them."
)
_UNCHECKED = (
    "It was not checked whether members and non-members differ by their texts alone{why}. Until then a finding may be a"
    " difference of the texts, not a leak of the model."
)
