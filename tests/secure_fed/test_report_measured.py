"""The report's sentences and numbers on what a run measured: metrics of each task, membership inference, and its audit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from secure_fed.config import RunConfig
from secure_fed.learning.tasks import TASKS
from secure_fed.report.measured import how_good, key_numbers
from secure_fed.report.page import write_report
from secure_fed.report.record import RunRecord
from tests.golden import golden
from tests.secure_fed.conftest import make_private
from tests.secure_fed.pages import Edit, RunFolder, changed, reports

pytestmark = pytest.mark.usefixtures("never_drawn")


def record(task: str, row: dict[str, Any], **result: Any) -> RunRecord:
    config = RunConfig().replace({("data", "train"): "rows.jsonl", ("data", "task"): task})
    facts = {"label_names": ["a", "b", "c"], "clients": []}
    return RunRecord("run", config, facts, ({"round": 1, **row},), {**row, **result} if result else None)


OWN: dict[str, dict[str, float]] = {
    **{"classification": {"macro_f1": 0.5}, "multi_label": {"micro_f1": 0.4}, "tokens": {"f1": 0.3}},
    **{"regression": {"rmse": 1.5, "pearson": 0.7}, "question_answering": {"f1": 0.3}},
    **{"causal_lm": {"perplexity": 33.0}, "chat": {"perplexity": 33.0}, "multiple_choice": {}},
}


def test_every_task_is_told_of_in_its_own_words() -> None:
    """The metrics in a sentence and as key numbers; accuracy beside the commonest label, and what was not measured."""
    found = {
        task: record(task, {**OWN[task], "loss": 1.0} | ({} if task == "regression" else {"accuracy": 0.25}))
        for task in TASKS
    }
    common = {"commonest": {"share": 0.5, "of": 400}}
    found |= {
        "no learning": record("classification", {"accuracy": 0.52}, **common, no_learning="It learned nothing."),
        "better than the commonest label": record("classification", {"accuracy": 0.8}, **common),
        "tags beside the commonest": record("tokens", {"f1": 0.3, "accuracy": 0.9}, **common),
        "tokens, nothing measured": record("tokens", {}),
        "classification, loss alone": record("classification", {"loss": 0.5}),
    }
    lines = [f"{name}: {how_good(one)} {dict(key_numbers(one))}" for name, one in found.items()]
    golden("secure_fed/report_tasks.txt", "\n".join(lines) + "\n")


def measured(**changes: Any) -> Edit:
    """An edit that gives a run a membership result."""
    rate = {"tpr": 0.034, "tpr_interval": [0.023, 0.048], "fpr": 0.01, "fpr_interval": [0.0046, 0.0189]}
    found = {
        **{"attack": "loss", "unit": "example", "auc": 0.5312, "auc_interval": [0.5047, 0.5577], "why": ""},
        **{"members": 900, "non_members": 903, "tpr_at_fpr": {"0.01": rate, "0.001": None}},
    }
    return lambda run: run["result"].update(membership={**found, **changes})


def of_dummies(mu: float) -> Edit:
    """An edit that makes a run private with this mu, and gives it a figure of dummy clients."""
    figure = measured(of="dummies", attack="dummies", unit="client", auc=0.803, auc_interval=[0.762, 0.838])
    return changed({"result.privacy.gaussian_mu": mu}, make_private, figure)


NONE = measured(auc=None, auc_interval=None, tpr_at_fpr=None, why="the pool is <empty>")
INTERVALS = ([0.49, 0.55], [0.46, 0.52], [0.42, 0.56], [0.41, 0.47])


def test_membership_stands_beside_accuracy_and_has_a_section(run_folder: RunFolder) -> None:
    """Nothing found is never called privacy, the unit is named, and no figure has its reason."""
    cases: dict[str, dict[str, Any]] = {
        "no membership": {},
        "membership": {"edit": measured()},
        **{f"in {low} to {high}": {"edit": _within(low, high)} for low, high in INTERVALS},
        **{unit: {"edit": measured(unit=unit)} for unit in ("client", "person")},
        "no figure": {"edit": NONE},
    }
    text = reports(run_folder, cases).split("# membership\n")[1]
    golden("secure_fed/report_membership.txt", text)
    assert "<empty>" not in write_report(run_folder(edit=NONE)).read_text(encoding="utf-8")


def _within(low: float, high: float) -> Edit:
    return measured(auc=(low + high) / 2, auc_interval=[low, high])


def audited(folder: Path, told: str) -> None:
    """Writes an audit into a run's folder; `told` becomes its audit.json."""
    (folder / "private").mkdir(exist_ok=True)
    (folder / "private" / "audit.html").write_text("an audit", encoding="utf-8")
    (folder / "private" / "audit.json").write_text(told, encoding="utf-8")


def links(folder: Path) -> int:
    """How often the report links to the audit."""
    return write_report(folder).read_text(encoding="utf-8").count('<a href="private/audit.html">')


@pytest.mark.parametrize("edit", [measured(), lambda run: None])
def test_the_audit_is_linked_where_there_is_one_of_this_state(run_folder: RunFolder, edit: Edit) -> None:
    """A run that is resumed after its audit has an audit of another state."""
    folder = run_folder(5, edit=edit)
    assert links(folder) == 0
    others = ('{"rounds": 4}', '{"rounds": 6}', '{"rounds": 5.0}', '{"rounds": "5"}', '{"rounds": null}')
    for other in (*others, "{}", "[5]", '{"rou', ""):
        audited(folder, other)
        assert links(folder) == 0, other
    audited(folder, '{"rounds": 5}')
    assert links(folder) == 1
    (folder / "private" / "audit.html").unlink()
    assert links(folder) == 0
    audited(folder, "")
    (folder / "private" / "audit.json").unlink()
    (folder / "private" / "audit.json").mkdir()
    assert links(folder) == 0, "one that cannot be read does not keep the report from being written"
