"""The audit of a model by texts that were in its training and others: all signals, baselines, the verdict, and its page.

The verdict is void if a baseline explains the signals, else a leak, else nothing found. Tests are one-sided: members score
higher than the others (Mann and Whitney). The smallest of k p-values is multiplied by k (Bonferroni), so a model that never saw
the members is called a leak with a probability of at most ALPHA, whatever the signals.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from rich.table import Column, Table

from attacks.adversary.null import Floats
from attacks.any_model import signals
from attacks.any_model.subject import Subject
from attacks.evidence.baseline import Baseline, blind
from attacks.options import Say
from attacks.record import Curve
from attacks.report import curves
from attacks.report.phrases import CAPITALS, MODEL_HEADLINES, ends, hundred
from secure_fed.errors import UsageError
from secure_fed.report.formatting import percent, rate
from secure_fed.report.markup import bullets, facts, figure, figures, paragraph, section, table, text
from secure_fed.report.page import document
from secure_fed.report.terminal import PlainConsole
from secure_fed.runs.durable import atomic_write
from secure_fed.runs.roc import Ranking, band, rank, to_dict

FEWEST = 10
ALPHA = 0.05
SHUFFLES = 1999  # the smallest p-value of tied scores is 1 / 2000: a leak even as the best of a hundred signals
_AT_ONCE = 100  # permutations, which bounds the memory
BLIND = {"words": "their words and labels", "length": "their length", "dates": "their dates"}


@dataclass(frozen=True)
class Audit:
    """scores: by signal, (texts,) with members first."""

    subject: Subject
    scores: dict[str, Floats]
    found: dict[str, Found]
    baselines: dict[str, Baseline | str]
    verdict: Verdict

    def to_dict(self) -> dict[str, Any]:
        asked = self.subject.asked
        return {
            **asked.heading,
            "references": [*(["base model"] if self.subject.base else []), *asked.references],
            "shadows": asked.shadows,
            "task": self.subject.task.title,
            "members": self.subject.texts.members,
            "non_members": len(self.subject.texts.rows) - self.subject.texts.members,
            "verdict": self.verdict.level,
            "sentences": [*self.verdict.sentences, *self.subject.notes],
            "best": self.verdict.best,
            "baselines": [
                {"by": name, "why": one}
                if isinstance(one, str)
                else {"by": name, "auc": one.ranking.auc, "at_chance": one.at_chance}
                for name, one in self.baselines.items()
            ],
            "signals": [
                {
                    "signal": name,
                    "paper": signals.PAPERS.get(name, "your own"),
                    **to_dict(one.ranking),
                    "p_value": one.p_value,
                }
                for name, one in self.found.items()
            ],
        }


def audited(subject: Subject, say: Say) -> Audit:
    """Compute every signal that the model allows. UsageError for fewer than ten texts on a side."""
    members, count = subject.texts.members, len(subject.texts.rows)
    if min(members, count - members) < FEWEST:
        raise UsageError(
            f"there are {members} members and {count - members} others: give at least {FEWEST} of each, and a hundred to see a "
            "small leak"
        )
    say("reading the texts with the model")
    scores = _signals(subject, say) | _by_shadows(subject, say)
    truth = np.arange(count) < members
    say("separating them without any model")
    units = [SimpleNamespace(examples=(subject.texts.examples[index],)) for index in range(count)]
    without = blind(units, subject.texts.plain, truth, subject.dates)
    found = {name: _found(own[truth], own[~truth]) for name, own in scores.items()}
    return Audit(subject, scores, found, without, judged(found, without))


def _signals(subject: Subject, say: Say) -> dict[str, Floats]:
    losses, asked = subject.losses(), subject.asked
    scores = {"loss": signals.loss(losses)}
    if subject.base or asked.references:
        say("reading the texts with its references")
        scores |= _beside(subject, losses, subject.reference_losses())
    if subject.language_model:
        tokens = subject.tokens()
        scores["loss by zlib"] = signals.per_zlib(tokens, subject.texts.learned)
        scores["Min-K %"] = signals.min_k(tokens)
        scores["Min-K %++"] = signals.min_k_plus(tokens)
        if asked.recall is not None:
            say("reading the texts after the texts of --recall")
            scores["ReCaLL"] = signals.recall(tokens, signals.log_likelihoods_after(subject, asked.recall))
    if asked.neighbours:
        say(f"reading {asked.neighbours} neighbours of each text")
        near = signals.neighbour_losses(subject, asked.neighbours, asked.neighbour_model)
        scores["neighbourhood"] = signals.neighbourhood(losses, near)
    return scores | {file.stem: signals.own_scores(file, subject) for file in asked.attacks}


def _beside(subject: Subject, losses: Floats, of_references: list[Floats]) -> dict[str, Floats]:
    """Signals that use references. With a single reference RMIA ranks texts nearly as the first does, and LiRA has no
    variance.
    """
    found = {"loss beside references": signals.calibrated(losses, of_references)}
    if len(of_references) == 1:
        return found
    likely = subject.asked.data.task != "regression"
    phi, *others = (signals.confident(own, likely=likely) for own in (losses, *of_references))
    return found | signals.offline(phi, np.stack(others))


def _by_shadows(subject: Subject, say: Say) -> dict[str, Floats]:
    """LiRA and RMIA, if shadows were requested."""
    asked = subject.asked
    if asked.config is None:
        return {}
    from attacks.any_model import shadows

    say(f"training {asked.shadows} shadow models")
    said = 0

    def shown(done: int, total: int) -> None:
        """Say how far the training is, in tenths."""
        nonlocal said
        if 10 * done // total > said:
            said = 10 * done // total
            say(f"shadow models: {done} of {total} rounds")

    trained = shadows.made(asked, asked.config, asked.shadows, shown, subject.kept)
    return shadows.scored(shadows.target(subject), trained)


@dataclass(frozen=True)
class Found:
    """A signal's ranking, and the probability of one as good if the members were not in the training."""

    ranking: Ranking
    p_value: float


def _found(members: Floats, others: Floats) -> Found:
    return Found(rank(members, others), above_by_chance(members, others))


def above_by_chance(members: Floats, others: Floats) -> float:
    """The one-sided p-value of the rank sum. Equal arguments give equal results.

    Without equal scores by the exact law, or its normal limit for more than eight texts on either side. Where many scores are
    equal that limit is wrong: then by `SHUFFLES` random permutations, or by all if there are fewer.
    """
    from scipy.stats import PermutationMethod, mannwhitneyu

    scores = np.concatenate([members, others])
    shuffled = PermutationMethod(n_resamples=SHUFFLES, batch=_AT_ONCE, random_state=0)
    method = "auto" if len(np.unique(scores)) == len(scores) else shuffled
    return float(mannwhitneyu(members, others, alternative="greater", method=method).pvalue)


@dataclass(frozen=True)
class Verdict:
    """level: "void", "leak" or "nothing". best: the strongest signal."""

    level: str
    best: str
    sentences: tuple[str, ...]


def judged(found: Mapping[str, Found], baselines: Mapping[str, Baseline | str]) -> Verdict:
    """baselines: by what each uses ("words" or other), its result without the model, or the reason why it was not tried."""
    best = min(found, key=lambda name: (found[name].p_value, -found[name].ranking.auc))
    corrected = min(1.0, found[best].p_value * len(found))
    ranking = found[best].ranking
    right = f"{hundred(ranking.auc)} right{ends(ranking.auc_interval, hundred)}"
    tried = f"{len(found)} signals were tried" if len(found) > 1 else "One signal was tried"
    differ = {by: one for by, one in baselines.items() if not isinstance(one, str) and not one.at_chance}
    if differ:
        level = "void"
        by = max(differ, key=lambda name: differ[name].ranking.auc)
        first = (
            f"Members and others differ by {BLIND[by]} alone: a classifier without the model is right in "
            f"{100 * differ[by].ranking.auc:.0f} of 100 guesses. So the figures here show how the texts were chosen, not "
            "what the model remembers."
        )
    elif corrected < ALPHA:
        level = "leak"
        first = (
            f"The model gives away which texts were in its training: of 100 guesses which of two texts trained, its {best} "
            f"gets {right}; chance is 50. If it had never seen the members, a signal as good as this would come up with a "
            f"probability of {corrected:.2g}{' (of all signals together)' if len(found) > 1 else ''}."
        )
    else:
        level = "nothing"
        first = (
            f"{tried}, and none separates members from others better than chance: of 100 guesses which of two texts trained, "
            f"the best, {best}, gets {right}."
        )
    unchecked = (
        f"Whether they differ by {BLIND[by]} alone was not checked: {why}."
        for by, why in baselines.items()
        if isinstance(why, str)
    )
    return Verdict(level, best, (first, *unchecked, *([_OTHERS] if level == "nothing" else []), _NOT_AT_RANDOM))


_OTHERS = "Other attacks, with reference models or with observations from the training, may show more."
_NOT_AT_RANDOM = "No epsilon follows: membership was not decided at random, so other differences cannot be ruled out."


def show(audit: Audit) -> None:
    """Print the verdict, and a table of the signals."""
    console, facts = PlainConsole(), audit.to_dict()
    adapter = f" with {facts['adapter']}" if facts["adapter"] else ""
    console.print(f"verdict on {facts['model']}{adapter}: {CAPITALS[facts['verdict']]}", style="bold")
    for sentence in facts["sentences"]:
        console.print(sentence)
    table = Table("signal", "AUC, 95 % interval", Column("caught at 1 % false alarms", justify="right"))
    for one in facts["signals"]:
        caught = one["tpr_at_fpr"]["0.01"]
        rate = "too few others" if caught is None else percent(caught["tpr"])
        table.add_row(one["signal"], f"{one['auc']:.3f}{ends(one['auc_interval'])}", rate)
    console.print(table)
    console.print(f"{facts['members']} members and {facts['non_members']} others; an AUC of .5 is chance")


def written(audit: Audit, folder: Path, *, show_texts: bool = False) -> Path:
    """Write page, JSON and scores into an existing folder, for their owner alone, each atomically; returns the page's path."""
    atomic_write(folder / "scores.csv", as_csv(audit), private=True)
    atomic_write(folder / "audit.json", json.dumps(audit.to_dict(), indent=1) + "\n", private=True)
    atomic_write(folder / "audit.html", page(audit, show_texts=show_texts), private=True)
    return folder / "audit.html"


def as_csv(audit: Audit) -> str:
    """A line for each text: its row in its file from 0, copies counted, whether it is a member, and its scores."""
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerow(["row", "member", *audit.scores])
    subject = audit.subject
    for index, (row, *values) in enumerate(zip(subject.places, *audit.scores.values(), strict=True)):
        writer.writerow([row, int(index < subject.texts.members), *map(float, values)])
    return file.getvalue()


SHOWN = 20  # texts with the highest scores
_LONGEST = 240  # characters of a text


def page(audit: Audit, *, show_texts: bool = False) -> str:
    """The whole document; equal audits give equal bytes. show_texts: whether it shows the texts with the highest scores."""
    told = audit.to_dict()
    css = "privacy" if told["verdict"] == "nothing" else "privacy warning"
    title = f'<header>\n<p class="kind">Privacy audit of a model</p>\n<h1>{text(_name(told))}</h1>\n</header>\n'
    sections = (
        title + section(MODEL_HEADLINES[told["verdict"]], "".join(map(paragraph, told["sentences"])), css_class=css),
        _evidence(audit, told),
        _signal_table(told),
        _without_model(told),
        _texts(audit) if show_texts else "",
        section("Why no epsilon is stated", paragraph(_NO_EPSILON)),
        section("What this audit does not prove", bullets(_LIMITS)),
        _how(audit, told, show_texts=show_texts),
    )
    style = resources.files("attacks.report").joinpath("audit.css").read_text(encoding="utf-8")
    return document(f"{_name(told)}: audit", "".join(sections), style)


def _name(told: dict[str, Any]) -> str:
    """The names of the model and its adapter, without their folders."""
    return " with ".join(str(told[part]).rstrip("/").rpartition("/")[2] for part in ("model", "adapter") if told[part])


def _evidence(audit: Audit, told: dict[str, Any]) -> str:
    """The best signal, as a rate over pairs of texts and as a curve; a void audit shows nothing about the model: no curve."""
    best = next(one for one in told["signals"] if one["signal"] == told["best"])
    low, high = map(hundred, best["auc_interval"])
    pairs = (
        f"Take one text of the training and one other, and guess which is which by the signal “{best['signal']}”. Of 100 such "
        f"guesses {hundred(best['auc'])} are right ({low} to {high} with 95 % confidence); chance is 50."
    )
    if told["verdict"] == "void":
        pairs += " But a classifier distinguishes them without the model, so this is no property of the model."
    key = [
        ("members and others", f"{told['members']:,} and {told['non_members']:,}"),
        ("right guesses of 100", hundred(best["auc"])),
        *((f"members caught at {_share(rate)} false alarms", _caught(best, rate)) for rate in best["tpr_at_fpr"]),
    ]
    drawn = "" if told["verdict"] == "void" else _drawing(audit, best)
    return section("The evidence", paragraph(pairs, "lead"), facts(key, "key"), figures(drawn) if drawn else "")


def _drawing(audit: Audit, best: dict[str, Any]) -> str:
    scores, members = audit.scores[best["signal"]], best["members"]
    found = band(scores[:members], scores[members:])
    drawn = Curve(*(tuple(map(float, part)) for part in (found.fpr, found.tpr, found.low, found.high)))
    caption = (
        "Upwards: members that the signal finds. To the right: others that it accuses. Both on logarithmic axes; the dotted "
        f"line is chance. {found.meaning}"
    )
    place = list(audit.scores).index(best["signal"]) + 1
    return figure(
        f"Signal: {best['signal']}",
        curves.drawn_roc(f"operating characteristic, signal {place}", drawn, max(members, best["non_members"])),
        caption,
    )


def _signal_table(told: dict[str, Any]) -> str:
    head = ("signal", "paper", "right of 100 (95 %)", *(f"caught at {_share(rate)}" for rate in _RATES), "by chance")
    rows = [
        (
            one["signal"],
            one["paper"],
            f"{hundred(one['auc'])}{ends(one['auc_interval'], hundred)}",
            *(_caught(one, rate) for rate in _RATES),
            f"{min(1.0, one['p_value'] * len(told['signals'])):.2g}",
        )
        for one in told["signals"]
    ]
    return section("Every signal", paragraph(_READING), table(head, rows))


def _caught(one: dict[str, Any], rate: str) -> str:
    """The true-positive rate at a false-positive rate of at most `rate`, with its interval."""
    at = one["tpr_at_fpr"][rate]
    if at is None:
        return "too few others"
    return f"{percent(at['tpr'])}{ends(at['tpr_interval'], percent)}"


def _share(rate: str) -> str:
    return f"{100 * float(rate):g} %"


def _without_model(told: dict[str, Any]) -> str:
    """The baselines, which void the audit if they distinguish members from others."""
    rows = []
    for one in told["baselines"]:
        result = {True: "at chance", False: "NOT AT CHANCE: this audit is void", None: f"not tried: {one.get('why')}"}
        rows.append((BLIND[one["by"]], hundred(one.get("auc")), result[one.get("at_chance")]))
    void = any(one.get("at_chance") is False for one in told["baselines"])
    loud = paragraph("Members and others differ without any model, so no figure here is about the model.", "loud")
    return section(
        "Without any model", loud if void else "", paragraph(_BASELINE), table(("by", "right of 100", "result"), rows)
    )


def _texts(audit: Audit) -> str:
    """The texts with the highest scores of the best signal, members and others alike."""
    scores, texts, places = audit.scores[audit.verdict.best], audit.subject.texts, audit.subject.places
    order, plain = sorted(range(len(scores)), key=lambda row: -scores[row])[:SHOWN], texts.plain
    rows = [
        (
            str(place),
            "yes" if row < texts.members else "no: a false alarm",
            str(places[row]),
            rate(float(scores[row])),
            plain[row] if len(plain[row]) <= _LONGEST else plain[row][:_LONGEST] + " ...",
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


_RATES = ("0.01", "0.001")
_READING = (
    "A signal is a number for each text, higher where the text looks like a training text. “Right of 100”: right guesses "
    "between a member and another text; 50 is chance. “Caught at 1 %”: members found by a rule that accuses at most "
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
    "it can be shown only if it was decided at random, for each text by itself, whether it trains. Here members and others "
    "were chosen in another way, which no statistic can undo. “secure-fed audit prepare” decides it so before a training."
)
_LIMITS = (
    "Finding nothing does not show that there is no leak: other attacks may find more.",
    "The audit is about texts such as these, on average. A rare text may be exposed where the average one is not.",
    "The baselines find differences of words and labels, not every difference: more wrong labels among the others may look "
    "like a leak. Choose members and others at random where you can.",
    "A text may also be in the model through its base model or another training.",
)
