"""The public files of a private run depend only on its releases, its settings and public data.

The main test is one of non-interference: two runs over different private data, with different coins and noise, publish the
same releases. Their public files, reports and exports must then be equal byte for byte. docs/result.schema.json describes every
result.json, and the report tells of every run that writes one.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jsonschema
import pytest

from secure_fed.config import RunConfig
from secure_fed.export import trained
from secure_fed.federation import Federation
from secure_fed.report.page import write_report
from secure_fed.rounds.server import Server
from secure_fed.rounds.sums import Intake
from secure_fed.runs import published, result
from secure_fed.runs.directory import LOCK, PUBLIC, Published
from secure_fed.runs.published import FACTS, RESULT, ROUND, Table
from secure_fed.tensors.tensors import Tensors
from tests.cells import chosen
from tests.golden import refused
from tests.secure_fed import private_toys, toys
from tests.secure_fed.conftest import make_private
from tests.secure_fed.masked_edit import masked
from tests.secure_fed.pages import Edit, RunFolder, changed, told

pytestmark = pytest.mark.usefixtures("never_drawn")

Rows = Sequence[Mapping[str, Any]]
SITES = [f"site-{letter}" for letter in "abcdef"]


def rows(text: str, count: int, calm: int) -> Rows:
    """`count` rows for each site (4, 5, ... for a `count` of 0), of which the first `calm` have the label calm."""
    return [
        {"text": f"{text} word{row}", "label": "calm" if row < calm else "wild", "site": site}
        for number, site in enumerate(SITES)
        for row in range(count or 4 + number)
    ]


ONE, OTHER = rows("word1 calm", 5, 1), rows("zzz qqq xxx vvv yyy", 0, 3)
SAME_SIZES = rows("zzz qqq xxx vvv yyy", 5, 4)
CLIENT = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0, "federation.cohort": 3}
MASKED = {"secure_aggregation.enabled": True, "privacy.noise": "distributed", "federation.cohort": 4}
ALONE = {"training.microbatch": 1}  # nothing is compared for passes of several
SCENARIOS: dict[str, tuple[dict[str, Any], Rows]] = {
    "central": ({**CLIENT, "privacy.clip_quantile": 0.5, "evaluation.diagnostics": ["variation"]}, OTHER),
    "distributed": ({**CLIENT, **MASKED}, OTHER),
    # Where examples are protected, the number of a client's examples is public.
    "example": (
        {**CLIENT, **ALONE, "privacy.unit": "example"},
        SAME_SIZES,
    ),
}


@dataclass(frozen=True)
class Played(Server):
    """A server that puts its releases on the tape, or returns the tape's instead."""

    tape: list[Tensors] = field(default_factory=list)
    replays: bool = False

    def release(self, intake: Intake, state: Any, pass_name: str) -> Tensors:
        own = super().release(intake, state, pass_name)
        if self.replays:
            return self.tape.pop(0)
        self.tape.append(own)
        return own


def config(settings: Mapping[str, Any], model: Path, data: Path, **more: Any) -> RunConfig:
    usual = {
        "model.name": str(model),
        "data.train": str(data / "train.jsonl"),
        "data.test": str(data / "test.jsonl"),
        "data.client": "site",
        "privacy.delta": 1e-3,
        "federation.rounds": 2,
        "training.steps": 1,
        "training.batch_size": 4,
        "training.together": 1,
        "evaluation.audit_fraction": 0.0,
    }
    chosen = {**usual, **settings, **more}
    return RunConfig().replace({tuple(name.split(".", 1)): value for name, value in chosen.items()})  # type: ignore[misc]


def write(data: Path, train: Rows) -> None:
    data.mkdir(exist_ok=True)
    test = [{"text": f"word{row} calm", "label": ("calm", "wild")[row % 2], "site": "site-a"} for row in range(8)]
    others = [{**row, "text": f"{row['text']} {len(train)} others"} for row in [*train[:2], *test]]
    for name, own in (("train", train), ("test", test), ("others", others)):
        (data / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in own), encoding="utf-8")


def run(chosen: RunConfig, place: Path, tape: list[Tensors], *, replays: bool) -> Federation:
    """Runs a federation in `place`, with report and export."""
    built = Federation(chosen)
    played = Played(**vars(built.assembly.server), tape=tape, replays=replays)
    built.assembly = replace(built.assembly, server=played)
    built.run(place / "run")
    write_report(place / "run")
    trained.load_run(place / "run").export(place / "export")
    return built


def shown(place: Path) -> dict[str, bytes]:
    """Path -> content of every file under `place` outside private folders."""
    files = [file for file in sorted(place.rglob("*")) if file.is_file() and "private" not in file.parts]
    return {str(file.relative_to(place)): file.read_bytes() for file in files}


@pytest.mark.parametrize("scenario", chosen(SCENARIOS, ["central", "example"]))
def test_what_is_shown_follows_from_what_was_released(scenario: str, small_model: Path, tmp_path: Path) -> None:
    """The second run has other texts, lengths, labels, row counts (where private), coins and noise, but equal releases."""
    settings, other = SCENARIOS[scenario]
    tape: list[Tensors] = []
    place, data = tmp_path / "place", tmp_path / "data"
    write(data, ONE)
    more = {"evaluation.keep_best": True, "evaluation.non_members": str(data / "others.jsonl")}
    asked = config(settings, small_model, data, **more)
    first = run(asked, place, tape, replays=False)
    place.rename(tmp_path / "first")
    write(data, other)
    second = run(asked, place, tape, replays=True)

    assert not tape, "both runs released as often"
    assert {"run/result.json", "run/metrics.jsonl", "run/report.html", "export/README.md"} <= set(shown(place))
    assert shown(place) == shown(tmp_path / "first")
    assert first.warnings == second.warnings
    figures = [json.loads((one / "run/private/figures.json").read_text()) for one in (place, tmp_path / "first")]
    assert figures[0]["membership_of_rows"]["auc"] != figures[1]["membership_of_rows"]["auc"]
    of_data = [json.loads((one / "run/private/facts.json").read_text()) for one in (place, tmp_path / "first")]
    assert of_data[0]["data_digest"] != of_data[1]["data_digest"]
    files = {file.name: file.stat().st_mtime_ns for file in (place / "run").iterdir() if file.is_file()}
    assert set(files) == {*PUBLIC, LOCK}
    assert len({files[name] for name in PUBLIC}) == 1, "times tell how long rounds took"


@pytest.fixture(scope="module")
def held_out(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A private run with recorded models that is tested on the rows of held-out clients."""
    place = tmp_path_factory.mktemp("held-out")
    write(place / "data", ONE)
    settings = {**CLIENT, "data.test": "", "data.test_fraction": 0.34, "evaluation.record": "models"}
    settings["evaluation.target_accuracy"] = 0.1
    run(config(settings, small_model, place / "data"), place, [], replays=False)
    return place


def test_a_report_and_an_export_need_nothing_private(held_out: Path, tmp_path: Path) -> None:
    """Both come out the same without the private folder."""
    before = shown(held_out)
    hidden = (held_out / "run" / "private").rename(tmp_path / "hidden")
    try:
        write_report(held_out / "run")
        trained.load_run(held_out / "run").export(tmp_path / "export")
    finally:
        hidden.rename(held_out / "run" / "private")
    assert shown(held_out) == before
    exported = {f"export/{name}": content for name, content in shown(tmp_path / "export").items()}
    assert exported == {name: content for name, content in before.items() if name.startswith("export/")}


def test_only_its_owner_opens_the_private_part(held_out: Path) -> None:
    folder = held_out / "run" / "private"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.rglob("*") if file.is_file()}
    assert {"facts.json", "rounds.jsonl", "figures.json", "released.safetensors", "report.html"} <= set(modes)
    assert set(modes.values()) == {0o600}, modes
    with refused(ValueError):
        Published(held_out / "run").path("private/facts.json")


def test_accuracy_on_rows_held_out_of_private_ones_is_not_passed_on(held_out: Path) -> None:
    """Held-out rows are outside the guarantee. result.json has the accuracy and their source; other public files omit it."""
    result = json.loads((held_out / "run" / "result.json").read_text())
    assert isinstance(result["accuracy"], float)
    assert result["test"] == {"from": "held out by client", "rows": None}
    assert result["best_round"] is None
    assert result["diagnostics"]["target"] is None, "it follows from the accuracy of each round"
    assert "the clients held out for testing" in result["privacy_statement"]
    assert "accuracy" not in (held_out / "run" / "metrics.jsonl").read_text()
    card = (held_out / "export" / "README.md").read_text()
    assert f"{result['accuracy']:.4f}" not in card
    assert "withheld: these rows were held out" in card
    for page, tells in (("report.html", False), ("private/report.html", True)):
        words = (held_out / "run" / page).read_text()
        assert (f"{100 * result['accuracy']:.1f} %" in words) == tells
        assert ("the shared model is withheld here" in words) != tells


def test_a_digest_confirms_no_guess(held_out: Path, small_model: Path, tmp_path: Path) -> None:
    """Two runs over the same data store different digests, and public files contain no digest of data."""
    chosen = config({**CLIENT, "federation.rounds": 1}, small_model, held_out / "data")
    for name in ("one", "two"):
        Federation(chosen).run(tmp_path / name)
    one, two = (json.loads((tmp_path / name / "private" / "facts.json").read_text()) for name in ("one", "two"))
    again = Federation(chosen)
    plain = again.assembly.problem.facts["data_digest"]
    assert len({plain, one["data_digest"], two["data_digest"]}) == 3
    assert one["partition"]["digest"] != two["partition"]["digest"]
    assert all(plain not in (tmp_path / "one" / name).read_text() for name in ("run.json", "result.json"))
    again.run(tmp_path / "one", resume=True)  # the resumed run recognises its data


def names(value: Any, table: Table, at: str = "") -> list[str]:
    """The names in a public file that no table lists, or that have a value where their table has no public source."""
    wrong = []
    for name, inner in value.items():
        rule = table.get(name, "unknown")
        if isinstance(rule, Mapping) and isinstance(inner, Mapping):
            wrong += names(inner, rule, f"{at}{name}.")
        elif rule == "unknown" or (rule is None and inner is not None):
            wrong.append(f"{at}{name}")
    return wrong


@pytest.mark.parametrize("where", ["round", "result"])
def test_a_value_without_a_source_stops_a_private_run(where: str, tmp_path: Path) -> None:
    whole = result.summary
    with (
        patch.object(Server, "publishable", lambda self, record, state, plan: {**record, "clients_asked": 3})
        if where == "round"
        else patch("secure_fed.runs.run.summary", lambda *given: {**whole(*given), "clients_asked": 3}),
        refused(ValueError),
    ):
        toys.federation(private_toys.NOISE).run(tmp_path / "run")


ROOT = Path(__file__).resolve().parents[2]
OF_CLIENTS = {"privacy.unit": "client", "privacy.noise_multiplier": 1.0}
BEHIND_MASKS = {"secure_aggregation.enabled": True, **OF_CLIENTS}
SCHEMA: dict[str, Any] = json.loads((ROOT / "docs" / "result.schema.json").read_text(encoding="utf-8"))
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def check(result: dict[str, Any]) -> None:
    """Validates `result` as `jsonschema.validate` does, which also checks the schema at every call."""
    error = jsonschema.exceptions.best_match(VALIDATOR.iter_errors(result))
    if error is not None:
        raise error


def result_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return found | {"membership": found["membership"] or MEMBERSHIP}


MEMBERSHIP = {
    **{"attack": "loss", "unit": "example", "members": 400, "non_members": 380},
    **{"auc": 0.53, "auc_interval": [0.4, 0.66], "why": ""},
    "tpr_at_fpr": {
        "0.01": {"tpr": 0.02, "tpr_interval": [0, 0.1], "fpr": 0.01, "fpr_interval": [0, 0.02]},
        "0.001": None,
    },
}


def test_the_schema_is_one_and_describes_every_key() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert all(described["description"] for described in SCHEMA["properties"].values())


REALISED = {"result.privacy.realised": {"survivors": 3, "noise_multiplier": 1.2, "epsilon": 2.6}}
WRONG: dict[str, tuple[Edit, str, dict[str, list[Any]]]] = {  # the part of the result, and wrong values of its entries
    "open": (
        changed({}),
        "",
        {
            **{"surprise": [1], "schema": [2], "accuracy": [1.1, "0.9"], "unit": ["nobody"], "rounds": [0]},
            **{"epsilon": ["none", 1.0], "delta": [1e-5]},  # without a privacy unit
            **{"sampling_rate": [0], "bytes_up": [1.5], "label_names": ["asthma"]},
        },
    ),
    "private": (
        make_private,
        "",
        {
            **{"unit": ["none"], "privacy": [None], "epsilon": [None], "epsilon_participants": [None], "delta": [1.0]},
            **{"noise_multiplier": [None], "epsilon_cumulative": [None], "ended_early": [False]},
        },
    ),
    "guarantee": (make_private, "privacy", {"surprise": [1]}),
    "realised": (changed(REALISED, masked("distributed")), "privacy.realised", {"surprise": [1]}),
    "masks": (
        masked("nothing"),
        "secure_aggregation",
        {
            **{"surprise": [1], "bits": [16], "clients": [2], "failure": [1.5], "survivors": [0]},
            **{"active": [None], "threshold": [None]},
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_schema_accepts_a_result_and_no_wrong_or_missing_value(run_folder: RunFolder, name: str) -> None:
    edit, part, wrong = WRONG[name]
    result = result_in(run_folder(edit=edit))
    check(result)
    at = result
    for step in part.split(".") if part else []:
        at = at[step]
    cases = [{**at, key: value} for key, values in wrong.items() for value in values]
    cases += [{key: value for key, value in at.items() if key != lacked} for lacked in at]
    for case in cases:
        at.clear()
        at.update(case)
        with pytest.raises(jsonschema.ValidationError):
            check(result)


WRITTEN: list[dict[str, Any]] = [
    {},
    {"secure_aggregation.enabled": True},
    {**OF_CLIENTS, "federation.cohort": 2, "evaluation.bandwidth": 1.0, "evaluation.target_accuracy": 0.1},
    {**OF_CLIENTS, "method.name": "fra_lora", "method.transport_form": "sketch", "method.sketch": 1},
    {**OF_CLIENTS, **ALONE, "privacy.unit": "example", "evaluation.diagnostics": ["variation"]},
    {**BEHIND_MASKS, "privacy.noise": "distributed", "privacy.hidden_cohort": True, "federation.cohort": 2},
    {**OF_CLIENTS, "privacy.noise": "local"},
    {**OF_CLIENTS, "federation.sampling": "fixed"},
    {**BEHIND_MASKS, "federation.cohort": 3},
    {**BEHIND_MASKS, "privacy.noise": "distributed", "secure_aggregation.active": True},
    {**BEHIND_MASKS, "privacy.noise": "local"},
    {**BEHIND_MASKS, "privacy.unit": "example"},
]


@pytest.mark.parametrize("settings", chosen(WRITTEN, WRITTEN[:6]))
def test_what_runs_write_has_the_schema_and_sources_and_is_reported_finished_and_unfinished(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    done = toys.federation({**settings, "federation.rounds": 2}).run(tmp_path / "run")
    result = result_in(tmp_path / "run")
    check(result)
    unit, masks = settings.get("privacy.unit", "none"), settings.get("secure_aggregation.enabled", False)
    if unit == "none":
        assert done.withheld == {}
        assert done.summary["seconds"] > 0
        assert json.loads((tmp_path / "run" / "run.json").read_text())["partition"]["sizes"] == [5, 8, 11]
    else:
        tested = dict.fromkeys(("accuracy", "macro_f1", "loss"), published.TEST)
        files = [json.loads((tmp_path / "run" / name).read_text()) for name in ("run.json", "result.json")]
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert names(files[0], FACTS) == names(files[1], RESULT) == []
        assert [names(line, {**tested, **ROUND}) for line in lines] == [[], []]
        assert json.loads((tmp_path / "run" / "private" / "figures.json").read_text())["seconds"] > 0
    assert result["unit"] == unit
    assert (result["secure_aggregation"] is not None) == masks
    for finished in (True, False):
        text = told(tmp_path / "run")
        assert "NOT" not in text.split("Every setting")[0]
        assert ("Its cost" in text) is masks
        assert ("Its parameters" in text) is (masks and finished)
        if unit != "none":
            assert ("This run is (" if finished else "is planned to be (") in text
            assert f"Protected: {result['privacy']['unit']}." in text
        (tmp_path / "run" / "result.json").unlink(missing_ok=True)
