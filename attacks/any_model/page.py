"""The audit of a model as one HTML page, for readers without statistics: the verdict, then its figures."""

from __future__ import annotations

import math
from importlib import resources
from typing import Any

from attacks.any_model.audit import Audit
from attacks.any_model.verdict import ALPHA, BLIND
from attacks.report.page import plots
from attacks.report.page.plots import Curve
from secure_fed.report.formatting import MISSING, percent, rate
from secure_fed.report.page.markup import bullets, facts, figure, figures, paragraph, section, table, text
from secure_fed.report.page.page import document

SHOWN = 20  # texts with the highest scores
_LONGEST = 240  # characters of a text
_LOWEST = 1e-4  # lowest false-positive rate on the plot


def page(audit: Audit, *, show_texts: bool = False) -> str:
    """The whole document; equal audits give equal bytes. show_texts: whether it shows the texts with the highest scores."""
    told = audit.to_dict()
    sections = (
        _first(told),
        _evidence(audit, told),
        _signal_table(told),
        _without_model(told),
        _texts(audit) if show_texts else "",
        section("Why no epsilon is stated", paragraph(_NO_EPSILON)),
        section("What this audit does not prove", bullets(_LIMITS)),
        _how(audit, told, show_texts=show_texts),
    )
    style = resources.files("attacks.report.page").joinpath("audit.css").read_text(encoding="utf-8")
    return document(f"{_name(told)}: audit", "".join(sections), style)


def _name(told: dict[str, Any]) -> str:
    """The names of the model and its adapter, without their folders."""
    names = [str(told[part]).rstrip("/").rpartition("/")[2] for part in ("model", "adapter") if told[part]]
    return " with ".join(names)


def _first(told: dict[str, Any]) -> str:
    """The verdict in a sentence, and its evidence."""
    css = "privacy" if told["verdict"] == "nothing" else "privacy warning"
    sentences = "".join(paragraph(one) for one in told["sentences"])
    title = f'<header>\n<p class="kind">Privacy audit of a model</p>\n<h1>{text(_name(told))}</h1>\n</header>\n'
    return title + section(_HEADS[told["verdict"]], sentences, css_class=css)


def _evidence(audit: Audit, told: dict[str, Any]) -> str:
    """The best signal, as a rate over pairs of texts and as a curve; a void audit shows nothing about the model: no curve."""
    best = next(one for one in told["signals"] if one["signal"] == told["best"])
    low, high = best["auc_interval"]
    pairs = (
        f"Take one text of the training and one other, and guess which is which by the signal “{best['signal']}”. Of 100 such "
        f"guesses {100 * best['auc']:.0f} are right ({100 * low:.0f} to {100 * high:.0f} with 95 % confidence); tossing a coin "
        "gets 50."
    )
    if told["verdict"] == "void":
        pairs += " But a classifier distinguishes them without the model, so this is no property of the model."
    key = [
        ("members and others", f"{told['members']:,} and {told['non_members']:,}"),
        ("right guesses of 100", f"{100 * best['auc']:.0f}"),
        *((f"members caught at {_share(rate)} false alarms", _caught(best, rate)) for rate in best["tpr_at_fpr"]),
    ]
    drawn = "" if told["verdict"] == "void" else _drawing(audit, best)
    return section("The evidence", paragraph(pairs, "lead"), facts(key, "key"), figures(drawn) if drawn else "")


def _drawing(audit: Audit, best: dict[str, Any]) -> str:
    found = audit.best
    floor = max(_LOWEST, 10.0 ** math.floor(math.log10(1 / max(best["members"], best["non_members"]))))
    drawn = Curve(*(list(map(float, part)) for part in (found.fpr, found.tpr, found.low, found.high)))
    caption = (
        "Upwards: members that the signal finds. To the right: others that it accuses. Both on logarithmic axes; the dotted "
        f"line is a coin. {found.meaning}"
    )
    place = list(audit.scores).index(best["signal"]) + 1
    return figure(
        f"Signal: {best['signal']}",
        plots.drawn_roc(f"operating characteristic, signal {place}", drawn, floor),
        caption,
    )


def _signal_table(told: dict[str, Any]) -> str:
    head = ("signal", "paper", "right of 100 (95 %)", *(f"caught at {_share(rate)}" for rate in _RATES), "by chance")
    rows = []
    for one in told["signals"]:
        low, high = (100 * end for end in one["auc_interval"])
        chance = min(1.0, one["p_value"] * len(told["signals"]))
        rows.append(
            (
                one["signal"],
                one["paper"],
                f"{100 * one['auc']:.0f} ({low:.0f} to {high:.0f})",
                *(_caught(one, rate) for rate in _RATES),
                f"{chance:.2g}",
            )
        )
    return section("Every signal", paragraph(_READING), table(head, rows))


def _without_model(told: dict[str, Any]) -> str:
    """The baselines, which void the audit if they distinguish members from others."""
    rows = []
    for one in told["baselines"]:
        result = {True: "at chance", False: "NOT AT CHANCE: this audit is void", None: f"not tried: {one.get('why')}"}
        right = f"{100 * one['auc']:.0f}" if "auc" in one else MISSING
        rows.append((BLIND[one["by"]], right, result[one.get("at_chance")]))
    void = any(one.get("at_chance") is False for one in told["baselines"])
    loud = paragraph("Members and others differ without any model, so no figure here is about the model.", "loud")
    return section(
        "Without any model", loud if void else "", paragraph(_BASELINE), table(("by", "right of 100", "result"), rows)
    )


def _texts(audit: Audit) -> str:
    """The texts with the highest scores of the best signal, members and others alike."""
    scores, texts, places = audit.scores[audit.verdict.best], audit.subject.texts, audit.subject.places
    order = sorted(range(len(scores)), key=lambda row: -scores[row])[:SHOWN]
    rows = [
        (
            str(place),
            "yes" if row < texts.members else "no: a false alarm",
            str(places[row]),
            rate(float(scores[row])),
            _cut(texts.plain[row]),
        )
        for place, row in enumerate(order, 1)
    ]
    head = ("rank", "in the training", "row of its file, from 0", "score", "text")
    return section(f"The {len(rows)} texts that stand out most", paragraph(_PRIVATE, "notice"), table(head, rows))


def _how(audit: Audit, told: dict[str, Any], *, show_texts: bool) -> str:
    asked = audit.subject.asked
    rows = [
        ("model", told["model"]),
        ("adapter", told["adapter"] or "none"),
        ("references", ", ".join(told["references"]) or "none"),
        ("shadow models", str(told["shadows"] or "none")),
        ("task", told["task"]),
        ("members", str(asked.members)),
        ("others", str(asked.others)),
        ("texts cut after", f"{asked.max_length} tokens"),
        ("level of the verdict", f"{ALPHA:.0%} for all signals together"),
        ("texts on this page", f"the {SHOWN} that stand out most" if show_texts else "none (--show-texts shows some)"),
    ]
    return section("How this audit was made", facts(rows))


def _caught(one: dict[str, Any], rate: str) -> str:
    """The true-positive rate at a false-positive rate of at most `rate`, with its interval."""
    at = one["tpr_at_fpr"][rate]
    if at is None:
        return "too few others"
    return f"{percent(at['tpr'])} ({percent(at['tpr_interval'][0])} to {percent(at['tpr_interval'][1])})"


def _share(rate: str) -> str:
    return f"{100 * float(rate):g} %"


def _cut(plain: str) -> str:
    return plain if len(plain) <= _LONGEST else plain[:_LONGEST] + " ..."


_RATES = ("0.01", "0.001")
_HEADS = {
    "void": "This audit cannot tell: members and others differ without any model",
    "leak": "The model gives away which texts were in its training",
    "nothing": "Nothing was found",
}
_READING = (
    "A signal is a number for each text, higher where the text looks like a training text. “Right of 100”: right guesses "
    "between a member and another text; 50 is a coin's. “Caught at 1 %”: members found by a rule that accuses at most "
    "one in a hundred of the others. “By chance”: how probable a signal as good as this one is if the model never saw the "
    f"members, times the number of signals; below {ALPHA:g} the verdict is a leak."
)
_BASELINE = (
    "Classifiers without access to the model tried to distinguish members from others: by their words and labels, by their "
    "length, and by dates. This cannot work if members and others differ only by the training. If they do not differ, one of "
    "the three claims a difference in at most one audit in 20."
)
_PRIVATE = "This page contains texts of the data, as requested: treat it as you treat the data."
_NO_EPSILON = (
    "An epsilon bounds how much one text changes the result of a training, whatever the other texts are. A lower bound on "
    "it can be shown only if a coin decided, for each text by itself, whether it trains. Here members and others were chosen "
    "in another way, which no statistic can undo. “secure-fed audit prepare” tosses such coins before a training."
)
_LIMITS = (
    "Finding nothing does not show that there is no leak: other attacks may find more.",
    "The audit is about texts such as these, on average. A rare text may be exposed where the average one is not.",
    "The baselines find differences of words and labels, not every difference: more wrong labels among the others may look "
    "like a leak. Choose members and others by coins where you can.",
    "A text may also be in the model through its base model or another training.",
)
