"""What a run measured, in words: the metrics of its task, and its membership inference.

The metrics are one sentence and the key numbers (`how_good`, `key_numbers`). The membership figure says how well one attack,
the cheapest, separates members from non-members, on units whose membership was decided at random: its meaning, also below
chance, and whether there are too few units for a conclusion (`meaning`). A negative result is reported as such and never as
privacy. The audit of the run, if there is one, is a separate page, which the section `membership` links.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from secure_fed.learning.tasks.headline import Commonest, first_metrics, has_accuracy, leads, spoken
from secure_fed.report.formatting import MISSING, at_most, counted, number, percent
from secure_fed.report.guarantee import most_auc, stated
from secure_fed.report.markup import facts, link, paragraph, section, subsection
from secure_fed.report.record import RunRecord
from secure_fed.runs import guarantee
from secure_fed.runs.roc import EXPECTED_FALSE_POSITIVES

FOR_THE_OWNER = (
    "the owner of the data alone: computed from its rows without noise, so no guarantee covers it; show it to nobody"
)
_CHANCE = 0.5
WIDE = 0.1  # a wider interval around chance excludes neither "no leak" nor a leak that matters


def keys(record: RunRecord) -> tuple[str, ...]:
    """The task's own metrics, beside accuracy."""
    return first_metrics(record.config.data.task, record.config.data.metric)


def key_numbers(record: RunRecord) -> list[tuple[str, str]]:
    """Accuracy, where the task has one, and the task's own metrics."""
    task = record.config.data.task
    if record.withholds_test:
        return []
    accuracy = [("accuracy", percent(record.last("accuracy")))] if has_accuracy(task) else []
    common = Commonest.of_result(record.result or {})
    if accuracy and common is not None:
        accuracy.append(("share of the commonest label", percent(common.share)))
    own = [(spoken(key), number(record.last(key))) for key in keys(record)]
    return own + accuracy if leads(task) else accuracy + own


def how_good(record: RunRecord) -> str:
    """The last evaluation as a sentence, and a second where it is no better than always predicting one label."""
    if record.withholds_test:
        return " ".join(filter(None, (_WITHHELD, noise_alone(record))))
    nothing = (record.result or {}).get("no_learning")
    return " ".join(filter(None, (_evaluated(record), nothing, noise_alone(record))))


def noise_alone(record: RunRecord) -> str:
    """How far the noise alone of a private run takes the loss, in sentences; empty where no probe was made."""
    found = record.facts.get("noise_alone")
    if not found:
        return ""
    alone = guarantee.noise_in_words(found, (record.result or {}).get("loss"))
    said = (alone, guarantee.shortened_steps(found), guarantee.hopeless_noise(found))
    return " ".join(f"{one[0].upper()}{one[1:]}." for one in said if one)


def _evaluated(record: RunRecord) -> str:
    config, accuracy, loss = record.config, record.last("accuracy"), record.last("loss")
    task, model = config.data.task, measured_model(bool(config.method.personal), config.privacy.unit)
    if accuracy is None and loss is None:
        return "The shared model has not been evaluated on test examples."
    if task in _SENTENCES and (accuracy is not None or not has_accuracy(task)):
        values = {key: number(record.last(key)) for key in keys(record)}
        return f"{model} {_SENTENCES[task].format(accuracy=percent(accuracy), **values)}.{_written(record)}"
    if accuracy is None:
        return f"{model} has a loss of {number(loss)} on the test examples."
    labels = len(record.facts["label_names"])
    label = f"one of {counted(labels, 'class', 'classes')}" if labels else "class"
    macro = number(record.last("macro_f1"))
    beside = "" if macro == MISSING else f" (macro-F1 {macro})"
    return f"{model} finds the right {label} for {percent(accuracy)} of the test examples{beside}."


def _written(record: RunRecord) -> str:
    """The agreement of written answers with the test rows' targets, as a sentence behind another; empty without any."""
    metric, rows = record.config.data.metric, record.config.evaluation.generate
    return (
        f" Its answers to up to {rows} test rows have {spoken(metric)} {number(record.last(metric))}." if metric else ""
    )


def measured_model(personal: bool, unit: str) -> str:
    """The model of the test set's metrics, as the subject of a sentence.

    personal: whether tensors stay with their clients. unit: the unit that privacy protects.
    """
    if not personal:
        return "The shared model"
    if unit == "none":
        return "A client's own model (the mean over those measured, at most ten)"
    return "The shared model with the personal tensors of the start"


def membership(record: RunRecord) -> str:
    """Accuracy, AUC and true-positive rates with their meaning; empty where nothing was measured or audited."""
    found = measured(record)
    measured_here = "" if not found else _reported(record, found)
    # Figures of the data itself; a private run's are in the owner's page alone.
    whose = paragraph(f"For {FOR_THE_OWNER}.", "notice") if record.private else ""
    of_data = "".join(
        subsection(title, whose + _reported(record, part))
        for title, key in _OF_DATA
        if (part := (record.result or {}).get(key))
    )
    # In a private run only the page in the private folder has the link, and lies beside the audit.
    path = record.audit.rpartition("/")[2] if record.private else record.audit
    audit = link(path, _AUDIT) if path else ""
    return section("Membership inference: what the model reveals", measured_here, of_data, audit)


def measured(record: RunRecord) -> Mapping[str, Any]:
    """The membership part of the result; empty where there is none."""
    return (record.result or {}).get("membership") or {}


def _reported(record: RunRecord, found: Mapping[str, Any]) -> str:
    if found.get("auc") is None:
        why = str(found.get("why") or "it was not measured")
        return paragraph(f"No figure: {why}.", "notice") + paragraph(_SILENT)
    key = (
        ("accuracy", percent(record.last("accuracy"))),
        (figure_name(found, ceiling(record)), auc(found)),
        (_sides(found), f"{number(found.get('members'))}, {number(found.get('non_members'))}"),
    )
    whom = f"{dummy_nouns(found)} that contributed," if of_dummies(found) else "members"
    caught = [(f"{whom} found at {100 * target:g} % false positives", rate) for target, rate in rates(found)]
    silent = _SILENT_DUMMIES if of_dummies(found) else _SILENT
    return (
        paragraph(_meaning(found, ceiling(record)))
        + facts(key, "key")
        + (facts(caught, "terms") if caught else "")
        + (_audited(record) if of_dummies(found) else "")
        + paragraph(silent)
    )


def _audited(record: RunRecord) -> str:
    """The figures of the audit's main attack on the same dummy units, if the audit may be shown, and why they differ."""
    cell = record.audited
    if not cell:
        return ""
    caught = ((f"found at {100 * target:g} % false positives", rate) for target, rate in rates(cell))
    figures = facts([("AUC, as on the page of the audit", auc(cell)), *caught], "terms")
    return paragraph(f"The audit's main attack on them is “{cell['title']}”. {_TWO_ATTACKS}") + figures


def ceiling(record: RunRecord) -> float | None:
    """The largest AUC that the run's guarantee allows, where it is known."""
    found = stated(record)
    return most_auc(found.terms) if found and found.holds else None


def _meaning(found: Mapping[str, Any], most: float | None) -> str:
    """How it was measured, then what the figure means."""
    if of_dummies(found):
        count = number(int(found.get("members") or 0) + int(found.get("non_members") or 0))
        return (
            f"The run had {count} {dummy_nouns(found)}, which hold nobody's data and exist for the audit alone."
            f" {number(found.get('members'))} of them, chosen at random, contributed a random direction of their own, as long"
            " as the clip norm, the most that one unit may; the others contributed nothing. In a round"
            f" {guarantee.dummies_enter(str(found.get('unit')))}. The run's own attack sees everything that was released, and"
            f" goes by how far the model moved along each direction. {meaning(found, most)}"
        )
    if of_rows(found):
        return f"{meaning(found)} {found['misleads']}"
    return (
        f"{meaning(found)} Before training, some {units(found)[0]} were left out at random. The attack has the final model, and"
        " names the one that the model fits better."
    )


def _sides(found: Mapping[str, Any]) -> str:
    if of_rows(found):
        return "rows that trained, that did not"
    return f"{dummy_nouns(found)} that contributed, that did not" if of_dummies(found) else "members, held out"


def auc(found: Mapping[str, Any]) -> str:
    """The AUC with its interval: "0.531 (0.501 to 0.560)"."""
    if found.get("auc") is None:
        return MISSING
    between = found.get("auc_interval")
    return number(float(found["auc"])) + (
        f" ({number(float(between[0]))} to {number(float(between[1]))})" if between else ""
    )


def headline(record: RunRecord) -> list[tuple[str, str]]:
    """The name and the value of the run's one membership figure: the audit's where the page may show it, else its own."""
    found = measured(record)
    if not found:
        return []
    by_audit, name = of_dummies(found) and record.audited, figure_name(found, ceiling(record))
    return [(f"{name}, by the audit", auc(record.audited)) if by_audit else (name, short_auc(found))]


def short_auc(found: Mapping[str, Any]) -> str:
    """The AUC, or that there is none; the reason is elsewhere in the report."""
    return "no figure (why: below)" if found.get("auc") is None else auc(found)


def figure_name(found: Mapping[str, Any], most: float | None) -> str:
    """The name of the figure, which is about dummies in a run that has them, with the values to compare it with."""
    whose = f" of {dummy_nouns(found)}" if of_dummies(found) else ""
    return f"membership AUC{whose} (at random: 0.5{allowed(found, most)})"


def allowed(found: Mapping[str, Any], most: float | None) -> str:
    """What the noise allows, to be put behind chance; empty where it is not known, or the figure is not of dummies."""
    return f"; this noise allows up to {at_most(most)}" if most is not None and of_dummies(found) else ""


def rates(found: Mapping[str, Any]) -> list[tuple[float, str]]:
    """`(false-positive rate, share of members caught there with its interval)`, the largest rate first."""
    found_at = [(float(target), rate) for target, rate in (found.get("tpr_at_fpr") or {}).items()]
    return [(target, _rate(found, target, rate)) for target, rate in sorted(found_at, key=lambda one: -one[0])]


def _rate(found: Mapping[str, Any], target: float, rate: Mapping[str, Any] | None) -> str:
    if rate is None:
        others = "held out"
        if of_dummies(found) or of_rows(found):
            others = f"{dummy_nouns(found)} that did not contribute" if of_dummies(found) else "that did not train"
        return f"not stated: {number(found.get('non_members'))} {others} are {too_few(target)}"
    accused = f"{percent(rate.get('fpr'))}{_share(rate.get('fpr_interval'))} falsely accused"
    return f"{percent(rate['tpr'])}{_share(rate.get('tpr_interval'))}, with {accused}"


def too_few(target: float) -> str:
    """Why a true-positive rate at this false-positive rate is not stated, in both pages. An exact law would do as well."""
    return (
        f"too few for a rate of {100 * target:g} %, which takes {math.ceil(EXPECTED_FALSE_POSITIVES / target - 1e-9):,}"
    )


def _share(interval: Any) -> str:
    if not interval:
        return ""
    low, high = map(float, interval)
    return f" ({percent(low)} to {percent(high)})" if low < high else " exactly"


def of_dummies(found: Mapping[str, Any]) -> bool:
    return found.get("of") == "dummies"


def of_rows(found: Mapping[str, Any]) -> bool:
    """Whether who trained was not decided at random."""
    return found.get("of") == "rows"


def dummy_nouns(found: Mapping[str, Any]) -> str:
    """The dummy units of a figure: "dummy clients" or "dummy examples"."""
    return f"dummy {guarantee.dummy_units(str(found.get('unit')))}"


def units(found: Mapping[str, Any]) -> tuple[str, str]:
    """The units, and one of them, in words."""
    return _UNITS.get(str(found.get("unit")), _UNITS["example"])


def meaning(found: Mapping[str, Any], most: float | None = None) -> str:
    """The meaning of the AUC in a sentence, and the judgement on it; empty where nothing was measured.

    most: the largest AUC that the guarantee allows, where it is known.
    """
    if found.get("auc") is None:
        return ""
    right = f"{100 * float(found['auc']):.0f}"
    other = "one that did not" if of_rows(found) else "one that was held out"
    pair = (
        f"Of a {dummy_nouns(found)[:-1]} that contributed and one that did not, the attack names the one that did"
        if of_dummies(found)
        else f"Of {units(found)[1]} that trained and {other}, the attack names the one that trained"
    )
    return f"{pair} in {right} of 100 pairs; a guess at random does in 50. {_judgement(found, most)}".strip()


def _judgement(found: Mapping[str, Any], most: float | None) -> str:
    """The conclusion that the interval allows; empty without an interval."""
    between = found.get("auc_interval")
    if not between:
        return ""
    low, high = map(float, between)
    interval = f"The 95 % interval is {100 * low:.1f} to {100 * high:.1f}"
    if low > _CHANCE and of_dummies(found):
        return f"{interval}: {dummy_nouns(found)} that contributed can be distinguished from others. {_compared(low, most)}"
    if low > _CHANCE and of_rows(found):
        return f"{interval}: the model fits rows that trained better than the others, unless these are of another kind."
    if low > _CHANCE:
        return f"{interval}: the model reveals something about whether {units(found)[1]} was in its training."
    if high < _CHANCE:
        return f"{interval}, below chance. That is not privacy: the opposite guess is right more often."
    below = " A value below 50 is chance; it does not show privacy." if float(found["auc"]) < _CHANCE else ""
    if high - low > WIDE:
        sizes = f"{number(found.get('members'))} and {number(found.get('non_members'))}"
        return f"{interval}: {sizes} are too few to show whether there is a leak.{below}"
    return f"{interval}: this attack found nothing.{below}"


def _compared(low: float, most: float | None) -> str:
    """How the lower end of an AUC's interval compares with the largest AUC that the noise allows."""
    allows = "an epsilon allows some of it" if most is None else f"this noise allows up to {at_most(100 * most)} of 100"
    if most is not None and low > most:
        return f"That is too many: {allows}. Run secure-fed audit."
    return f"That is no leak by itself: {allows}{', and secure-fed audit says how much' if most is None else ''}."


# By task: the model's performance, from accuracy and the task's own metric.
_SENTENCES = {
    "multi_label": "finds exactly the right labels of {accuracy} of the test examples (micro-F1 {micro_f1})",
    "regression": "is off by {rmse} on the test examples (root mean square; Pearson's correlation {pearson})",
    "tokens": "finds the entities of the test texts with an F1 of {f1} (it tags {accuracy} of the words correctly)",
    "question_answering": "answers {accuracy} of the test questions exactly (F1 of the words {f1})",
    "causal_lm": "predicts {accuracy} of the next tokens of the test texts (perplexity {perplexity})",
    "chat": "predicts {accuracy} of the assistant's next tokens in the test conversations (perplexity {perplexity})",
    "multiple_choice": "chooses correctly in {accuracy} of the test examples",
}


_WITHHELD = (
    "The accuracy of the shared model is withheld here: it was measured on rows held out of the clients' own data, and no noise"
    " covers it."
)
_OF_DATA = (
    ("Units of the data", "membership_of_data"),
    ("Rows that trained, and rows that did not", "membership_of_rows"),
)
_SILENT = (
    "This is the cheapest attack, and it uses the final model only. Finding nothing is no sign of privacy: whoever sees more"
    " than the model may learn more. secure-fed audit tries stronger attacks."
)
_SILENT_DUMMIES = (
    "These figures are computed from what was released, so the guarantee covers them as it covers the model. A dummy unit that"
    " contributes changes the model as much as one unit may, usually more than real data do, so it is easier to detect."
    " The attacks of secure-fed audit know the exact law of the scores of those that"
    " did not contribute: few of them suffice for a rate, and the AUC and its interval differ from these."
)
_TWO_ATTACKS = "It sees the models alone, and the run's own attack the releases, so the two have different figures."
_AUDIT = "The audit of this run: every attack, from every vantage point"
_UNITS = {"example": ("examples", "an example"), "person": ("persons", "a person"), "client": ("clients", "a client")}
