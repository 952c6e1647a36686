"""All settings of one run: read, changed, compared, and checked against each other."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from secure_fed.config.sections import (
    DataConfig,
    EvaluationConfig,
    FederationConfig,
    MethodConfig,
    ModelConfig,
    PrivacyConfig,
    SecureAggregationConfig,
    TrainingConfig,
)
from secure_fed.config.setting import Setting, Typed, fitted
from secure_fed.errors import ConfigError, plainly


@dataclass(frozen=True)
class RunConfig:
    """All settings of one run. Equal configurations without privacy give equal results."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    federation: FederationConfig = field(default_factory=FederationConfig)
    method: MethodConfig = field(default_factory=MethodConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    privacy: PrivacyConfig = field(default_factory=PrivacyConfig)
    secure_aggregation: SecureAggregationConfig = field(default_factory=SecureAggregationConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        for name in sections():
            object.__setattr__(self, name, _fitted_section(name, getattr(self, name)))
        _check_together(self)

    @classmethod
    def from_dict(cls, tables: Mapping[str, Mapping[str, Any]]) -> RunConfig:
        """From nested tables; unknown sections and keys are refused."""
        return cls().replace({(s, k): value for s, table in tables.items() for k, value in _table(s, table).items()})

    @classmethod
    def load(cls, path: str | Path | None = None, overrides: Iterable[str] = ()) -> RunConfig:
        """From a TOML file (or the defaults) and `section.key=value` texts; the texts win, the later over the earlier."""
        tables = _read_toml(Path(path)) if path is not None else {}
        values: dict[tuple[str, str], Any] = {
            (s, k): v for s, table in tables.items() for k, v in _table(s, table).items()
        }
        return cls().replace(values | dict(map(_parse_override, overrides)))

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
            f"{section}.{name}: {value!r}, not {theirs[section][name]!r}"
            for section, table in mine.items()
            for name, value in table.items()
            if value != theirs[section][name]
        ]


def sections() -> dict[str, type]:
    """The class of every section, in their order."""
    return {section.name: section.default_factory for section in dataclasses.fields(RunConfig)}  # type: ignore[misc]


def find(section: str, name: str) -> Setting:
    """The setting `section.name`; of an unknown one, the nearest there is is offered."""
    known = sections()
    if section not in known:
        raise ConfigError(f"there is no section [{section}]; {_nearest(section, known)}")
    settings = {setting.name: setting for setting in dataclasses.fields(known[section])}
    if name not in settings:
        raise ConfigError(f"there is no setting {section}.{name}; {_nearest(name, settings)}")
    return settings[name]


def _nearest(word: str, known: Iterable[str]) -> str:
    words = list(known)
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.4)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(words)}"


def _table(section: str, table: Any) -> Mapping[str, Any]:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{section} = {table!r} stands outside a section; write [section] and then key = value")
    return table


def _read_toml(path: Path) -> dict[str, Any]:
    with plainly(ConfigError, f"the configuration {path} cannot be read", "give a TOML file"):
        content = path.read_bytes()
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # ValueError: no UTF-8, no TOML, or a number of thousands of digits
        raise ConfigError(f"the configuration {path} is not valid TOML: {error}") from error


def _parse_override(text: str) -> tuple[tuple[str, str], Typed]:
    name, equals, value = text.partition("=")
    section, dot, setting = name.strip().partition(".")
    if not (equals and dot):
        raise ConfigError(f"--set {text!r} is not of the form section.key=value")
    return (section, setting), Typed(value.strip())


def _fitted_section(name: str, section: Any) -> Any:
    settings = dataclasses.fields(section)
    return dataclasses.replace(
        section, **{s.name: fitted(f"{name}.{s.name}", s, getattr(section, s.name)) for s in settings}
    )


def _generated(config: RunConfig) -> bool:
    return config.data.name == "builtin/notes" and not config.data.train


def _own_data(config: RunConfig) -> bool:
    return not _generated(config)


def _dirichlet(config: RunConfig) -> bool:
    keyed = bool(config.data.client) or isinstance(config.data.train, tuple)
    return config.data.partition == "dirichlet" or (config.data.partition == "auto" and not keyed)


def _private(*units: str) -> Callable[[RunConfig], bool]:
    return lambda config: config.privacy.unit in units


def _counted_by_client(config: RunConfig) -> bool:
    return config.privacy.unit in ("example", "group") or (
        config.privacy.unit == "client" and config.privacy.noise == "local"
    )


# A setting, when it has an effect, and what that takes in words.
_EFFECTS: tuple[tuple[str, Callable[[RunConfig], bool], str], ...] = (
    ("data.name", lambda c: not c.data.train, "no data.train"),
    ("data.text", _own_data, "data of your own"),
    ("data.text_b", _own_data, "data of your own"),
    ("data.label", _own_data, "data of your own"),
    ("data.test_fraction", lambda c: _own_data(c) and not c.data.test, "data of your own and no data.test"),
    ("data.client", lambda c: c.data.partition in ("auto", "natural"), "data.partition = 'natural' or 'auto'"),
    ("data.examples", _generated, "data.name = 'builtin/notes' and no data.train"),
    ("data.test_examples", _generated, "data.name = 'builtin/notes' and no data.train"),
    ("data.alpha", _dirichlet, "data.partition = 'dirichlet'"),
    (
        "federation.server_momentum",
        lambda c: c.federation.server_optimizer != "mean",
        "federation.server_optimizer = 'momentum' or 'adam'",
    ),
    ("method.sketch", lambda c: c.method.transport_form == "sketch", "method.transport_form = 'sketch'"),
    ("training.epochs", lambda c: c.training.steps is None, "training.steps not to be set"),
    *(
        (f"privacy.{name}", _private("client", "example", "group"), "privacy.unit to be set")
        for name in ("epsilon", "delta", "noise_multiplier", "clip_norm", "ledger", "on_exhausted")
    ),
    ("privacy.noise", _private("client"), "privacy.unit = 'client'"),
    (
        "privacy.clip_quantile",
        lambda c: c.privacy.unit == "client" and c.privacy.noise == "central",
        "privacy.unit = 'client' and privacy.noise = 'central'",
    ),
    (
        "privacy.hidden_cohort",
        lambda c: c.privacy.unit == "client" and c.privacy.noise == "distributed",
        "privacy.unit = 'client' and privacy.noise = 'distributed'",
    ),
    *(
        (f"secure_aggregation.{name}", lambda c: c.secure_aggregation.enabled, "secure_aggregation.enabled = true")
        for name in ("corrupt", "dropout", "active", "neighbours", "threshold", "bits")
    ),
    (
        "secure_aggregation.range",
        lambda c: c.secure_aggregation.enabled and c.privacy.unit != "client",
        "secure_aggregation.enabled = true, and no clip norm on contributions (privacy.unit = 'client')",
    ),
    (
        "secure_aggregation.most_examples",
        lambda c: c.secure_aggregation.enabled and c.federation.weighting == "examples",
        "secure_aggregation.enabled = true and federation.weighting = 'examples'",
    ),
    ("privacy.group_column", _private("group"), "privacy.unit = 'group'"),
    ("privacy.group_examples", _private("group"), "privacy.unit = 'group'"),
    ("privacy.participations", _counted_by_client, "privacy.unit = 'example' or 'group', or privacy.noise = 'local'"),
    *(
        (f"privacy.{name}", lambda c: bool(c.privacy.ledger), "privacy.ledger")
        for name in ("data_set", "budget_epsilon", "budget_delta")
    ),
    ("training.microbatch", _private("example", "group"), "privacy.unit = 'example' or 'group'"),
    ("training.momentum", lambda c: c.training.optimizer == "sgd", "training.optimizer = 'sgd'"),
)


def _check_together(config: RunConfig) -> None:
    for name, effective, needs in _EFFECTS:
        section, _, setting = name.partition(".")
        value = getattr(getattr(config, section), setting)
        if value != find(section, setting).default and not effective(config):
            raise ConfigError(f"{name} = {value!r} has no effect here: it needs {needs}")
    federation = config.federation
    if federation.clients and federation.cohort and federation.cohort > federation.clients:
        raise ConfigError(
            f"federation.cohort is {federation.cohort}, more than the {federation.clients} clients of federation.clients"
        )
    if config.method.transport_form == "sketch" and federation.server_optimizer != "mean":
        raise ConfigError(
            f"federation.server_optimizer = {federation.server_optimizer!r} adds up means of several rounds, whose sketches "
            "span other columns: use 'mean', or method.transport_form = 'dense'"
        )
    _check_privacy(config)
    if config.data.partition == "natural" and not config.data.client and not isinstance(config.data.train, tuple):
        raise ConfigError("data.partition is 'natural', but data.client names no column that says whose each row is")


def _check_privacy(config: RunConfig) -> None:
    """Refuse what would void the guarantee, or what a guarantee cannot be made of."""
    privacy, federation = config.privacy, config.federation
    if privacy.unit == "none":
        return
    if privacy.epsilon is None and privacy.noise_multiplier is None:
        raise ConfigError(
            f"privacy.unit is {privacy.unit!r} without a guarantee: set privacy.epsilon, or privacy.noise_multiplier"
        )
    if privacy.unit == "group" and not privacy.group_column:
        raise ConfigError(
            "privacy.unit is 'group', but privacy.group_column names no column that says whose an example is"
        )
    if privacy.ledger and (privacy.budget_epsilon is None) != (privacy.budget_delta is None):
        raise ConfigError(
            "privacy.budget_epsilon and privacy.budget_delta limit a ledger together: set both or neither"
        )
    for name, held, revealed in (
        ("federation.weighting", federation.weighting == "examples", "the number of a client's examples is private"),
        ("federation.nonfinite", federation.nonfinite == "fail", "a run that fails tells of one client"),
        ("evaluation.per_client", config.evaluation.per_client, "accuracy on private data would leave without noise"),
    ):
        if held:
            section, _, setting = name.partition(".")
            value = getattr(getattr(config, section), setting)
            raise ConfigError(f"{name} = {value!r} is refused with privacy.unit = {privacy.unit!r}: {revealed}")
    if privacy.noise == "distributed":
        _check_distributed(config)
    if config.method.denoise == "shrink" and config.federation.server_optimizer != "mean" and _noised_sums(config):
        raise ConfigError(
            f"method.denoise = 'shrink' needs to know the noise, which federation.server_optimizer = "
            f"{federation.server_optimizer!r} changes: use 'mean', or method.denoise = 'truncate'"
        )


def _check_distributed(config: RunConfig) -> None:
    privacy, sampling = config.privacy, config.federation.sampling
    if not config.secure_aggregation.enabled:
        raise ConfigError(
            "privacy.noise = 'distributed' is a share of noise from each client, which protects their sum alone: set "
            "secure_aggregation.enabled = true, or privacy.noise = 'local'"
        )
    if sampling == "poisson" and not privacy.hidden_cohort:
        raise ConfigError(
            "federation.sampling = 'poisson' is refused with privacy.noise = 'distributed': the server sees who takes part, so "
            "the coins protect nobody; set privacy.hidden_cohort = true, where each client tosses for itself"
        )
    if sampling == "fixed" and privacy.hidden_cohort:
        raise ConfigError(
            "federation.sampling = 'fixed' contradicts privacy.hidden_cohort = true, where each client tosses a coin of its own"
        )


def _noised_sums(config: RunConfig) -> bool:
    """Whether noise is added to products that FRA averages."""
    return config.privacy.unit == "client" and config.method.name in ("fra_lora", "fra_then_ffa")
