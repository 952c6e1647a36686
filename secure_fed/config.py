"""Every setting of a run: frozen, typed, checked on entry, read from TOML and `section.key=value`.

A field's metadata holds its one-line explanation and its limits, so the reader, the checks and `secure-fed config init` say the
same thing. An unknown key is an error that offers the nearest one; a setting without effect beside the others is an error too.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secure_fed.errors import ConfigError


def key(default: Any, doc: str, **limits: Any) -> Any:
    """A setting: its default, what it means, and any of `choices`, `above`, `at_least`, `at_most`, `below`, `optional`."""
    return field(default=default, metadata={"doc": doc, **limits})


@dataclass(frozen=True)
class ModelConfig:
    name: str = key("builtin/tiny", "builtin/tiny, a folder, or a Hugging Face Hub id")
    device: str = key("cpu", "torch device: cpu, cuda, cuda:1, mps ...; auto takes the GPU where there is one")
    dtype: str = key("float32", "what the model computes in; adapters stay float32", choices=("float32", "bfloat16"))
    max_length: int = key(128, "texts are cut after this many tokens", at_least=2)


@dataclass(frozen=True)
class DataConfig:
    name: str = key("builtin/notes", "builtin/notes, a Hub id or a data set folder; not read when train is given")
    train: str | tuple[str, ...] = key(
        "", "a JSON Lines, CSV or Parquet file (.gz too), a folder, or a list: a client a file"
    )
    test: str = key("", "the same for the test set; empty: test_fraction of the training rows is held out")
    text: str = key("text", "column of the text")
    text_b: str = key("", "column of the second text of a pair")
    label: str = key("label", "column of the label: integers or names")
    client: str = key("", "column that says whose row it is (patient, author, site)")
    examples: int = key(20_000, "training examples to generate (builtin/notes)", at_least=1)
    test_examples: int = key(2_000, "test examples to generate (builtin/notes)", at_least=1)
    test_fraction: float = key(0.2, "share held out where there is no test set", above=0.0, below=1.0)
    partition: str = key(
        "auto",
        "how examples go to clients; auto: natural where the data say whose a row is, else dirichlet",
        choices=("auto", "iid", "dirichlet", "natural"),
    )
    alpha: float = key(
        10.0, "Dirichlet: concentration alpha times the class share; 1 is strong skew, 1000 is IID", above=0.0
    )


@dataclass(frozen=True)
class FederationConfig:
    clients: int | None = key(
        None, "number of clients (50, or as many as a natural partition has)", at_least=1, optional=50
    )
    cohort: int | None = key(
        None, "expected clients a round (10, or all where there are fewer)", at_least=1, optional=10
    )
    rounds: int = key(20, "communication rounds", at_least=1)
    seed: int = key(0, "of the partition, the cohorts and the training, never of released noise or keys", at_least=0)
    sampling: str = key(
        "fixed", "a cohort of exactly that size, or each client by its own coin", choices=("fixed", "poisson")
    )
    weighting: str = key(
        "uniform", "a client's weight in the mean: one, or its example count", choices=("uniform", "examples")
    )
    nonfinite: str = key(
        "skip", "a client sends NaN or infinity: leave it out, or fail the run", choices=("skip", "fail")
    )
    server_optimizer: str = key("mean", "how the mean change is applied (FedOpt)", choices=("mean", "momentum", "adam"))
    server_lr: float = key(1.0, "server learning rate", above=0.0)
    server_momentum: float = key(0.9, "server momentum, Adam's beta 1", at_least=0.0, below=1.0)


@dataclass(frozen=True)
class MethodConfig:
    name: str = key("ffa_lora", "see `secure-fed methods`")
    rank: int = key(8, "rank of the adapter", at_least=1)
    alpha: float = key(16.0, "LoRA alpha: the change is scaled by alpha / rank", above=0.0)
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead")
    dropout: float = key(0.0, "dropout before the adapter", at_least=0.0, below=1.0)
    target_modules: str | tuple[str, ...] = key("", "as in PEFT: names, a pattern or all-linear; empty: PEFT's default")
    modules_to_save: tuple[str, ...] = key((), "as in PEFT: modules that train in full, beside the task head")
    personal: tuple[str, ...] = key(
        (), "names or patterns of trained tensors that stay on the client, such as classifier.*"
    )
    freeze_init: str = key("orthonormal", "the frozen A (FFA)", choices=("orthonormal", "gaussian"))
    double_rank: bool = key(False, "twice the rank, since only half the factors train (FFA)")
    switch_round: int = key(5, "rounds of FRA before FFA (fra_then_ffa)", at_least=1)


@dataclass(frozen=True)
class TrainingConfig:
    lr: float = key(2e-3, "local learning rate", above=0.0)
    epochs: int = key(1, "local epochs a round", at_least=1)
    steps: int | None = key(None, "local steps a round, instead of epochs", at_least=1, optional=10)
    batch_size: int = key(16, "local batch size", at_least=1)
    optimizer: str = key("adamw", "local optimiser", choices=("adamw", "sgd"))
    momentum: float = key(0.0, "of sgd", at_least=0.0, below=1.0)
    weight_decay: float = key(0.0, "of either optimiser", at_least=0.0)
    lr_schedule: str = key("constant", "of lr over the rounds", choices=("constant", "linear", "cosine"))
    proximal: float = key(0.0, "FedProx: mu/2 |w - w_global|^2 is added to the local loss", at_least=0.0)


@dataclass(frozen=True)
class PrivacyConfig:
    unit: str = key("none", "whom differential privacy protects", choices=("none",))


@dataclass(frozen=True)
class EvaluationConfig:
    every: int = key(1, "evaluate after every so many rounds, and after the last", at_least=1)
    batch_size: int = key(64, "evaluation batch size", at_least=1)
    per_client: bool = key(False, "also the accuracy on each client's own examples: mean and worst decile")
    tensorboard: bool = key(False, "also write TensorBoard events into the run directory")


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run. Equal configurations without privacy give equal results."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for section in dataclasses.fields(self):
            _check_section(section.name, getattr(self, section.name))
        _check_together(self)

    @classmethod
    def from_dict(cls, sections: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """From nested tables; unknown sections and keys are refused."""
        return RunConfig().replace({(s, k): v for s, table in sections.items() for k, v in _table(s, table).items()})

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
        """From a TOML file (or the defaults) and `section.key=value` settings, the later winning."""
        config = cls.from_dict(_read_toml(Path(path))) if path is not None else cls()
        return config.override(overrides)

    def override(self, settings: Iterable[str]) -> RunConfig:
        """These settings with `section.key=value` texts applied."""
        return self.replace(dict(_parse_override(text) for text in settings))

    def replace(self, values: Mapping[tuple[str, str], Any]) -> RunConfig:
        """These settings with `(section, key)` values changed, checked all together."""
        tables: dict[str, dict[str, Any]] = {}
        for (section, name), value in values.items():
            setting = _find(section, name)
            tables.setdefault(section, {})[name] = _coerce(f"{section}.{name}", setting, value)
        return dataclasses.replace(
            self, **{section: dataclasses.replace(getattr(self, section), **table) for section, table in tables.items()}
        )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain tables, as `from_dict` reads them."""
        return dataclasses.asdict(self)

    def differences(self, other: RunConfig) -> list[str]:
        """One `section.key: mine, not theirs` for every setting that differs."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{section}.{name}: {value!r}, not {theirs[section][name]!r}"
            for section, table in mine.items()
            for name, value in table.items()
            if value != theirs[section][name]
        ]


def _sections() -> dict[str, type]:
    return {f.name: f.default_factory for f in dataclasses.fields(RunConfig)}  # type: ignore[misc]


def _nearest(word: str, words: Iterable[str]) -> str:
    known = list(words)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"


def _find(section: str, name: str) -> dataclasses.Field[Any]:
    sections = _sections()
    if section not in sections:
        raise ConfigError(f"there is no section [{section}]; {_nearest(section, sections)}")
    settings = {f.name: f for f in dataclasses.fields(sections[section])}
    if name not in settings:
        raise ConfigError(f"there is no setting {section}.{name}; {_nearest(name, settings)}")
    return settings[name]


def _table(section: str, table: Any) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{section} = {table!r} stands outside a section; write [section] and then key = value")
    return table


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not valid TOML: {error}") from error


def _parse_override(text: str) -> tuple[tuple[str, str], Any]:
    name, equals, raw = text.partition("=")
    section, dot, setting = name.strip().partition(".")
    if not (equals and dot):
        raise ConfigError(f"--set {text!r} is not of the form section.key=value")
    _find(section, setting)
    return (section, setting), _Raw(raw.strip())


class _Raw(str):
    """A value as typed on a command line: TOML where it is valid TOML of the right type, else the text itself."""

    def toml(self) -> Any:
        try:
            return tomllib.loads(f"value = {self}")["value"]
        except tomllib.TOMLDecodeError:
            return str(self)


def _coerce(name: str, setting: dataclasses.Field[Any], value: Any) -> Any:
    kinds = [kind.strip() for kind in str(setting.type).split("|")]
    typed = value.toml() if isinstance(value, _Raw) else value
    if isinstance(typed, list | tuple) and "tuple[str, ...]" in kinds and all(isinstance(item, str) for item in typed):
        return tuple(typed)
    if type(typed) is int and "float" in kinds:
        return float(typed)
    if typed is None and "None" in kinds:
        return None
    if type(typed).__name__ in kinds:
        return typed
    if isinstance(value, _Raw) and "str" in kinds:
        return str(value)
    if isinstance(typed, str) and kinds == ["tuple[str, ...]"]:
        return (typed,)
    expected = " or ".join(_SPOKEN[kind] for kind in kinds if kind != "None")
    raise ConfigError(f"{name} is {str(value) if isinstance(value, _Raw) else value!r}, but it must be {expected}")


_SPOKEN = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "tuple[str, ...]": "a list of texts",
}


def _check_section(section: str, values: Any) -> None:
    for setting in dataclasses.fields(values):
        value, limits = getattr(values, setting.name), setting.metadata
        if value is None:
            continue
        name = f"{section}.{setting.name}"
        if "choices" in limits and value not in limits["choices"]:
            raise ConfigError(f"{name} is {value!r}, but it must be one of {', '.join(limits['choices'])}")
        for word, broken in _BROKEN.items():
            if word in limits and (broken(value, limits[word]) or value != value):
                raise ConfigError(f"{name} is {value}, but it must be {word.replace('_', ' ')} {limits[word]}")


_BROKEN = {
    "above": lambda value, limit: not value > limit,
    "at_least": lambda value, limit: value < limit,
    "below": lambda value, limit: not value < limit,
    "at_most": lambda value, limit: value > limit,
}

# (setting, the setting that decides, the values with which the first one has an effect)
_EFFECT = (
    ("training.momentum", "training.optimizer", ("sgd",)),
    ("federation.server_momentum", "federation.server_optimizer", ("momentum", "adam")),
    ("data.alpha", "data.partition", ("auto", "dirichlet")),
)


def _check_together(config: RunConfig) -> None:
    def get(name: str) -> Any:
        section, _, setting = name.partition(".")
        return getattr(getattr(config, section), setting)

    for name, decider, values in _EFFECT:
        if get(name) != _find(*name.split(".")).default and get(decider) not in values:
            raise ConfigError(f"{name} has no effect with {decider} = {get(decider)!r}; it needs {' or '.join(values)}")
    federation = config.federation
    if federation.clients and federation.cohort and federation.cohort > federation.clients:
        raise ConfigError(
            f"federation.cohort is {federation.cohort}, more than the {federation.clients} clients of federation.clients"
        )
    if config.data.partition == "natural" and not config.data.client and not isinstance(config.data.train, tuple):
        raise ConfigError("data.partition is 'natural', but data.client names no column that says whose each row is")


def commented_toml() -> str:
    """A TOML file with every key at its default, each under its explanation."""
    lines = ["# A secure-fed run. Every key stands at its default; `secure-fed train THIS_FILE` runs it.", ""]
    for section, kind in _sections().items():
        lines.append(f"[{section}]")
        for setting in dataclasses.fields(kind):
            lines.append(f"# {setting.metadata['doc']}{_limits(setting.metadata)}")
            lines.append(_toml_line(setting))
        lines.append("")
    return "\n".join(lines)


def _limits(metadata: Mapping[str, Any]) -> str:
    if "choices" in metadata:
        return f" ({' | '.join(metadata['choices'])})"
    words = [f"{word.replace('_', ' ')} {metadata[word]}" for word in _BROKEN if word in metadata]
    return f" ({', '.join(words)})" if words else ""


def _toml_line(setting: dataclasses.Field[Any]) -> str:
    value = setting.default
    if value is None:
        return f"# {setting.name} = {setting.metadata['optional']}"
    if isinstance(value, bool):
        return f"{setting.name} = {str(value).lower()}"
    if isinstance(value, tuple):
        return f"{setting.name} = {list(value)}"
    return f'{setting.name} = "{value}"' if isinstance(value, str) else f"{setting.name} = {value!r}"
