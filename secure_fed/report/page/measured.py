"""A task's metrics: one sentence in words, and its key numbers."""

from __future__ import annotations

from secure_fed.learning.tasks.commonest import Commonest, no_better
from secure_fed.learning.tasks.headline import first_metrics, has_accuracy, leads, spoken
from secure_fed.report.formatting import MISSING, counted, number, percent
from secure_fed.report.page.record import RunRecord
from secure_fed.report.whose import measured_model
from secure_fed.runs import noise_words

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
    common = Commonest.of_result(record.result or {})
    return " ".join(filter(None, (_evaluated(record), no_better(record.last("accuracy"), common), noise_alone(record))))


def noise_alone(record: RunRecord) -> str:
    """How far the noise alone of a private run takes the loss, in sentences; empty where no probe was made."""
    found = record.facts.get("noise_alone")
    if not found:
        return ""
    said = (noise_words.noise_in_words(found), noise_words.shortened_steps(found), noise_words.hopeless_noise(found))
    return " ".join(f"{one[0].upper()}{one[1:]}." for one in said if one)


def _written(record: RunRecord) -> str:
    """The agreement of written answers with the test rows' targets, as a sentence behind another; empty without any."""
    metric, rows = record.config.data.metric, record.config.evaluation.generate
    return (
        f" Its answers to up to {rows} test rows have {spoken(metric)} {number(record.last(metric))}." if metric else ""
    )


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
