"""The whole configuration of a run: read from TOML and `section.key=value`, changed, compared, and written with explanations.

An unknown key is an error that suggests a setting: the same name in another section, the setting that another library calls so,
or the most similar name.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from secure_fed.config.checks import check
from secure_fed.config.setting import Setting, Typed, coerced, limits_in_words
from secure_fed.config.settings import Sections, sections
from secure_fed.errors import ConfigError, plainly


@dataclass(frozen=True)
class RunConfig(Sections):
    """All settings of one run. Equal configurations without privacy give equal results."""

    def __post_init__(self) -> None:
        for name in sections():
            section = getattr(self, name)
            values = {
                setting.name: coerced(f"{name}.{setting.name}", setting, getattr(section, setting.name))
                for setting in dataclasses.fields(section)
            }
            object.__setattr__(self, name, dataclasses.replace(section, **values))
        check(self)

    @classmethod
    def from_dict(cls, tables: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """From nested tables; unknown sections and keys are refused."""
        return cls().replace(_flat(tables))

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
        """From a TOML file (or the defaults) and `section.key=value` texts, which override it; later texts override earlier."""
        tables = _read_toml(Path(path)) if path is not None else {}
        return cls().replace(_flat(tables) | dict(map(_parse_override, overrides)))

    def override(self, overrides: Iterable[str]) -> RunConfig:
        """These settings with `section.key=value` texts applied."""
        return self.replace(dict(map(_parse_override, overrides)))

    def replace(self, values: Mapping[tuple[str, str], Any]) -> RunConfig:
        """These settings with `(section, key)` values changed, checked all together."""
        changed: dict[str, dict[str, Any]] = {}
        for (section, name), value in values.items():
            find(section, name)
            changed.setdefault(section, {})[name] = value
        return dataclasses.replace(
            self,
            **{section: dataclasses.replace(getattr(self, section), **table) for section, table in changed.items()},
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain tables, as `from_dict` reads them."""
        return dataclasses.asdict(self)

    def differences(self, other: RunConfig) -> list[str]:
        """One `section.key: mine, not theirs` for every setting that differs."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{section}.{name}: {value!r:.300}, not {theirs[section][name]!r:.300}"
            for section, table in mine.items()
            for name, value in table.items()
            if value != theirs[section][name]
        ]


def _flat(tables: Mapping[str, Any]) -> dict[tuple[str, str], Any]:
    for section, table in tables.items():
        if not isinstance(table, Mapping):
            if section in sections():
                raise ConfigError(
                    f"{section} is a section: write [{section}], and below it key = value", setting=section
                )
            remedy = f"write [section] and then key = value{_also(_settings_called(section))}"
            raise ConfigError(f"{section} = {table!r:.80} stands outside a section; {remedy}")
        if not table and section not in sections():
            raise ConfigError(f"there is no section [{section}]; {nearest(section, sections())}", setting=section)
    return {(section, key): value for section, table in tables.items() for key, value in table.items()}


def _read_toml(path: Path) -> dict[str, Any]:
    with plainly(ConfigError, f"the configuration {path} cannot be read", "give a TOML file"):
        content = path.read_bytes()
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the configuration {path} is not UTF-8: it has the byte {content[error.start]:#04x} at position {error.start}; "
            "save it as UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, or a number of thousands of digits
        raise ConfigError(f"the configuration {path} is not valid TOML: {error}") from error


def _parse_override(text: str) -> tuple[tuple[str, str], Typed]:
    name, equals, value = text.partition("=")
    section, dot, setting = name.strip().partition(".")
    if not (equals and dot):
        raise ConfigError(f"--set {text!r} is not of the form section.key=value{_also(_settings_called(name.strip()))}")
    return (section, setting), Typed(value.strip())


def _also(settings: Sequence[str]) -> str:
    return f"; did you mean {' or '.join(settings)}?" if settings else ""


@cache
def find(section: str, name: str) -> Setting:
    """The setting `section.name`; the error for an unknown one suggests the nearest name."""
    known = sections()
    if section not in known:
        raise ConfigError(f"there is no section [{section}]; {_meant(name, section, known)}", setting=section)
    settings = {setting.name: setting for setting in dataclasses.fields(known[section])}
    if name not in settings:
        message = f"there is no setting {section}.{name}; {_meant(name, name, settings)}"
        raise ConfigError(message, setting=f"{section}.{name}")
    return settings[name]


def _meant(name: str, word: str, known: Iterable[str]) -> str:
    """The suggestion: the settings that are called `name`, or else the known word nearest to `word`."""
    own = _settings_called(name)
    return f"did you mean {' or '.join(own)}?" if own else nearest(word, known)


# Names of Hugging Face's training arguments and PEFT's configurations, and of other federated libraries.
ELSEWHERE = {
    **dict.fromkeys(("learning_rate", "local_lr"), "training.lr"),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "local_epochs"), "training.epochs"),
    **dict.fromkeys(("max_steps", "local_steps"), "training.steps"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "training.batch_size"),
    **dict.fromkeys(("optim", "optimiser"), "training.optimizer"),
    **dict.fromkeys(("model_name", "model_name_or_path"), "model.name"),
    **dict.fromkeys(("max_seq_length", "max_seq_len", "max_len"), "model.max_length"),
    **dict.fromkeys(("dataset", "dataset_name"), "data.name"),
    **dict.fromkeys(("train_file", "train_data"), "data.train"),
    **dict.fromkeys(("test_file", "validation_file"), "data.test"),
    **dict.fromkeys(("r", "lora_r", "lora_rank"), "method.rank"),
    "lora_alpha": "method.alpha",
    "lora_dropout": "method.dropout",
    "lora_target_modules": "method.target_modules",
    **dict.fromkeys(("num_rounds", "num_server_rounds"), "federation.rounds"),
    "num_clients": "federation.clients",
    **dict.fromkeys(("clients_per_round", "num_selected_clients"), "federation.cohort"),
    "target_epsilon": "privacy.epsilon",
    "target_delta": "privacy.delta",
}


def _settings_called(name: str) -> list[str]:
    """The settings, as `section.key`, that have this name here or in another library."""
    found = [
        f"{section}.{name}"
        for section, settings in sections().items()
        if name in {field.name for field in dataclasses.fields(settings)}
    ]
    return found or ([ELSEWHERE[name]] if name in ELSEWHERE else [])


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word most similar to this one, or all known words."""
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(words)}"


def with_absolute_paths(config: RunConfig) -> RunConfig:
    """The same settings with absolute paths for every file and folder that exists, independent of the working directory."""
    data = config.data
    return config.replace(
        {
            ("model", "name"): _absolute(config.model.name, Path.is_dir),
            ("data", "name"): _absolute(data.name, Path.is_dir),
            ("data", "chat_template"): _absolute(data.chat_template),
            **{("privacy", name): _absolute_path(getattr(config.privacy, name)) for name in ("ledger", "ledger_heads")},
            **{("data", name): _each_absolute(getattr(data, name)) for name in ("train", "test")},
            ("evaluation", "non_members"): _each_absolute(config.evaluation.non_members),
        }
    )


def _each_absolute(paths: str | tuple[str, ...]) -> str | list[str]:
    return _absolute(paths) if isinstance(paths, str) else [_absolute(path) for path in paths]


def _absolute_path(name: str) -> str:
    """The absolute path of a file that may not exist yet."""
    return str(Path(name).expanduser().absolute()) if name else name


def _absolute(name: str, there: Callable[[Path], bool] = Path.exists) -> str:
    with suppress(OSError, RuntimeError, ValueError):  # a bad path is refused where it is read
        path = Path(name).expanduser()
        if name and not name.startswith("builtin/") and there(path):
            return str(path.absolute())
    return name


def commented_toml() -> str:
    """A TOML file of every key. Read back, it is the default configuration; keys without a default are commented out."""
    lines = ["# A secure-fed run. Every key stands at its default; `secure-fed train THIS_FILE` runs it."]
    for name, section in sections().items():
        lines += ["", f"[{name}]"]
        for setting in dataclasses.fields(section):
            lines += [f"# {setting.metadata['doc']}{limits_in_words(setting)}", _line(setting)]
    return "\n".join(lines) + "\n"


def _line(setting: Setting) -> str:
    if setting.default is None:
        return f"# {setting.name} = {json.dumps(setting.metadata['optional'])}"
    return f"{setting.name} = {json.dumps(setting.default)}"
