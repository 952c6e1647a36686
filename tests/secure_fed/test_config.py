"""Settings: their defaults, how they are read, and which values are refused."""

from __future__ import annotations

import ast
import math
import pickle
import tomllib
from pathlib import Path
from typing import Any

from secure_fed.config import DataConfig, FederationConfig, MethodConfig, RunConfig, TrainingConfig, commented_toml
from secure_fed.config.run_config import ELSEWHERE
from secure_fed.errors import ConfigError
from tests.cells import every
from tests.golden import refused
from tests.secure_fed import private_toys, toys

KEYS = [(section, name) for section, table in RunConfig().to_dict().items() for name in table]


def loaded(tmp_path: Path, toml: str, *overrides: str) -> RunConfig:
    file = tmp_path / "run.toml"
    file.write_text(toml, encoding="utf-8")
    return RunConfig.load(file, overrides)


def test_a_configuration_survives_toml_and_its_own_tables(tmp_path: Path) -> None:
    config = loaded(
        tmp_path,
        """
        [model]
        max_length = 64
        [data]
        train = ["ward-a.jsonl", "ward-b.csv.gz"]
        label = "diagnosis"
        [federation]
        cohort = 2
        server_optimizer = "adam"
        server_momentum = 0.5
        [method]
        name = "fra_lora"
        target_modules = ["query", "key"]
        personal = ["classifier.*"]
        [training]
        lr = 1
        steps = 7
        """,
    )
    assert config.data == DataConfig(train=("ward-a.jsonl", "ward-b.csv.gz"), label="diagnosis")
    assert config.federation == FederationConfig(cohort=2, server_optimizer="adam", server_momentum=0.5)
    assert config.method == MethodConfig(name="fra_lora", target_modules=("query", "key"), personal=("classifier.*",))
    assert config.training == TrainingConfig(lr=1.0, steps=7)
    assert type(config.training.lr) is float
    assert RunConfig.from_dict(config.to_dict()) == config
    assert hash(config) == hash(RunConfig.from_dict(config.to_dict())), "frozen: nothing of it can be changed"


def test_the_commented_file_is_the_defaults_and_explains_every_key(tmp_path: Path) -> None:
    text = commented_toml()
    assert list(tomllib.loads(text)) == list(RunConfig().to_dict())
    assert loaded(tmp_path, text) == RunConfig()
    lines = text.splitlines()
    for section, name in KEYS:
        start = lines.index(f"[{section}]")
        at = next(at for at in range(start, len(lines)) if lines[at].removeprefix("# ").startswith(f"{name} = "))
        assert lines[at - 1].startswith("# ")
        assert len(lines[at - 1]) > 10


def test_every_line_of_the_commented_file_that_is_commented_out_can_be_put_in(tmp_path: Path) -> None:
    text = commented_toml()
    unset = [name for (_, name), value in zip(KEYS, values(RunConfig()), strict=True) if value is None]
    for name in unset:
        text = text.replace(f"# {name} = ", f"{name} = ")
    with refused(ConfigError, "evaluation.dummies"):
        loaded(tmp_path, text)
    text = text.replace('unit = "none"', 'unit = "client"')
    text = text.replace('transport_form = "dense"', 'transport_form = "sketch"')
    text = text.replace("enabled = false", "enabled = true")
    for name in ("participations", "band"):
        text = text.replace(f"\n{name} = ", f"\n# {name} = ")
    filled = loaded(tmp_path, text)
    assert (filled.federation.clients, filled.federation.cohort, filled.training.steps) == (200, 10, 10)
    assert (filled.privacy.epsilon, filled.privacy.clip_quantile) == (8.0, 0.5)
    masks = filled.secure_aggregation
    assert (filled.method.sketch, masks.neighbours, masks.threshold) == (32, 64, 33)


def values(config: RunConfig) -> list[Any]:
    return [value for table in config.to_dict().values() for value in table.values()]


def test_files_of_other_editors_and_values_of_thousands_of_digits(tmp_path: Path) -> None:
    (tmp_path / "windows.toml").write_text("[training]\nlr = 0.1\n", encoding="utf-8-sig")
    assert RunConfig.load(tmp_path / "windows.toml").training.lr == 0.1
    assert RunConfig.load(None, ["model.name=" + "9" * 5000]).model.name == "9" * 5000
    for value in ("9" * 5000, "[" * 100_000):  # on which the TOML reader itself chokes
        with refused(ConfigError, hide="TOML: .*"):
            loaded(tmp_path, f"[training]\nlr = {value}\n")


def test_set_wins_over_the_file_and_a_later_set_over_an_earlier(tmp_path: Path) -> None:
    """And may mend what does not fit together in the file."""
    toml = "[training]\nlr = 0.1\nbatch_size = 4\n[federation]\nclients = 4\ncohort = 8\n"
    config = loaded(tmp_path, toml, "training.lr=0.2", "federation.clients=8", "training.lr=0.3")
    assert (config.training.lr, config.training.batch_size, config.federation.clients) == (0.3, 4, 8)


@every(
    ("text", "value"),
    [
        ("data.label=1", "1"),
        ("data.label=true", "true"),
        ("data.label=2020-01-01", "2020-01-01"),
        ('data.label="a b"', "a b"),
        ("data.label=a=b", "a=b"),
        ("data.train=notes.jsonl", "notes.jsonl"),
        ("data.train=C:\\notes.jsonl", "C:\\notes.jsonl"),
        ('data.train=["a.csv", "b.csv"]', ("a.csv", "b.csv")),
        ("method.target_modules=all-linear", "all-linear"),
        ("method.personal=classifier.*", ("classifier.*",)),
        ("method.rslora=true", True),
        ("training.lr=1", 1.0),
        ("training.lr=1e-3", 1e-3),
        (" training.steps = 5 ", 5),
    ],
)
def test_a_typed_value_takes_the_type_of_its_setting(text: str, value: object) -> None:
    own = RunConfig.load(None, ["data.train=own.jsonl"])
    section, _, name = text.partition("=")[0].strip().partition(".")
    found = getattr(getattr(own.override([text]), section), name)
    assert found == value
    assert type(found) is type(value)


def test_lists_given_in_python_become_tuples() -> None:
    asked: Any = ["query"]
    config = RunConfig(method=MethodConfig(target_modules=asked))
    assert config.method.target_modules == ("query",)
    assert RunConfig.from_dict(config.to_dict()) == config


def test_differences_name_the_setting_and_both_values() -> None:
    mine = RunConfig.load(None, ["training.lr=0.5", "federation.cohort=3"])
    assert RunConfig().differences(RunConfig()) == []
    assert mine.differences(RunConfig()) == [
        "federation.cohort: 3, not None",
        f"training.lr: 0.5, not {RunConfig().training.lr}",
    ]


@every(("section", "name"), KEYS)
def test_every_setting_refuses_a_value_of_no_type(section: str, name: str) -> None:
    with refused(ConfigError, f"{section}.{name}", worded=False):
        RunConfig().replace({(section, name): object()})


@every("setting", [one for one, value in zip(KEYS, values(RunConfig()), strict=True) if isinstance(value, float)])
@every("value", [math.nan, math.inf, -math.inf, 10**5000])
def test_every_number_must_be_finite(setting: tuple[str, str], value: float) -> None:
    with refused(ConfigError, ".".join(setting), worded=False) as caught:
        RunConfig().replace({setting: value})
    assert "finite" in str(caught.value)


def test_sections_made_in_python_are_checked_too() -> None:
    wrong: Any = "fast"
    with refused(ConfigError, "training.lr"):
        RunConfig(training=TrainingConfig(lr=-1.0))
    with refused(ConfigError, "training.lr"):
        RunConfig(training=TrainingConfig(lr=wrong))
    with refused(ConfigError, "federation.rounds"):  # true is not a whole number
        RunConfig().replace({("federation", "rounds"): True})


def test_what_is_not_a_table_is_refused(tmp_path: Path) -> None:
    for toml in ("rounds = 3", "federation = 2", "[privacyy]"):
        with refused(ConfigError):
            loaded(tmp_path, toml)


def test_names_of_elsewhere_stand_for_settings_that_there_are() -> None:
    known = RunConfig().to_dict()
    for name, meant in ELSEWHERE.items():
        section, _, setting = meant.partition(".")
        assert setting in known[section]
        assert not any(name in table for table in known.values()), name


WITHOUT_EFFECT = """
secure_aggregation.corrupt=0.2 secure_aggregation.dropout=0.2 secure_aggregation.active=true
secure_aggregation.neighbours=8 secure_aggregation.threshold=5 secure_aggregation.bits=64 secure_aggregation.range=2
secure_aggregation.most_examples=9 method.sketch=16 privacy.band=5 privacy.hidden_cohort=true
"""


@every("override", WITHOUT_EFFECT.split())
def test_settings_of_masks_without_masks_are_refused(override: str) -> None:
    with refused(ConfigError, override.partition("=")[0]):
        RunConfig.load(None, [override])


def test_a_range_has_no_effect_beside_a_clip_norm() -> None:
    masks = ["secure_aggregation.enabled=true", "secure_aggregation.range=2"]
    assert RunConfig.load(None, masks).secure_aggregation.range == 2.0
    with refused(ConfigError, "secure_aggregation.range"):
        RunConfig.load(None, [*masks, "privacy.unit=client", "privacy.epsilon=8"])


@every(
    "overrides, setting, value, limit",
    [
        (["training.lr=0"], "training.lr", 0.0, "above 0.0"),
        (["federation.rounds=none"], "federation.rounds", "none", "a whole number"),
        (["federation.sampling=twice"], "federation.sampling", "twice", "one of auto, fixed, poisson, schedule"),
        (["training.momentum=0.5"], "training.momentum", 0.5, "training.optimizer = 'sgd'"),
        (["federation.clients=3", "federation.cohort=4"], "federation.cohort", 4, "at most 3"),
        (["data.train=x", "data.partition=matrix"], "data.matrix", "", "set with data.partition = 'matrix'"),
        (
            ["privacy.unit=client", "privacy.epsilon=1", "federation.nonfinite=fail"],
            "federation.nonfinite",
            "fail",
            "privacy.unit = 'client'",
        ),
    ],
)
def test_an_error_has_setting_value_and_limit_as_attributes(
    overrides: list[str], setting: str, value: object, limit: str
) -> None:
    with refused(ConfigError, setting) as caught:
        RunConfig.load(None, overrides)
    require_same_from_another_process(caught.value, setting, value, limit)


# Raised behind the configuration.

ROOT = Path(__file__).resolve().parents[2] / "secure_fed"
ROOMS = ("rounds", "runs", "export", "federation.py")


def test_every_error_raised_there_has_its_setting() -> None:
    """Each is raised as `ConfigError(..., setting=...)` or as `ConfigError(...).about(setting, value, limit)`."""
    bare, all_ = [], 0
    for file in (one for room in ROOMS for one in [ROOT / room, *(ROOT / room).rglob("*.py")] if one.is_file()):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        attributes = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
        about = {id(one.value) for one in attributes if isinstance(one, ast.Attribute) and one.attr == "about"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "ConfigError":
                all_ += 1
                if id(node) not in about and "setting" not in {one.arg for one in node.keywords}:
                    bare.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert not bare
    assert all_ > 20


@every(
    "settings, setting, value, limit",
    [
        ({"evaluation.record": "models"}, "evaluation.record", "models", "a run directory"),
        ({"federation.cohort": 4}, "federation.cohort", 4, "at most 3"),
        ({**private_toys.TARGET, "privacy.delta": 0.5}, "privacy.delta", 0.5, "below 0.33"),
        ({"evaluation.target_accuracy": 0.9}, "evaluation.target_accuracy", 0.9, "metrics with 'accuracy'"),
    ],
)
def test_an_error_of_a_run_has_them_too(settings: dict[str, object], setting: str, value: object, limit: str) -> None:
    with refused(ConfigError, setting) as caught:
        toys.federation(settings, metrics=lambda model, batches: {"loss": 1.0}).run()
    require_same_from_another_process(caught.value, setting, value, limit)


def require_same_from_another_process(found: ConfigError, setting: str, value: object, limit: str) -> None:
    error = pickle.loads(pickle.dumps(found))
    assert (error.setting, error.value, error.limit) == (setting, value, limit)
    assert str(error) == str(found)
    assert setting in str(error)
