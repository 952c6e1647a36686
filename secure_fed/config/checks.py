"""Settings that need others beside them, or exclude them: division of data, diagnostics, phantoms and privacy."""

from __future__ import annotations

from typing import NoReturn

from secure_fed.config.sections import DIAGNOSTICS, LOCAL_DIAGNOSTICS, DataConfig, Sections
from secure_fed.errors import ConfigError


def partition(data: DataConfig) -> None:
    """Refuse a division without the column or matrix that it goes by."""
    for kind, setting, there, missing in (
        (
            "natural",
            "data.client",
            bool(data.client) or isinstance(data.train, tuple),
            "names no column that says whose each row is",
        ),
        ("language", "data.language", bool(data.language), "names no column that says what one a row is in"),
        ("matrix", "data.matrix", bool(data.matrix), "says no client's share of any label"),
    ):
        if data.partition == kind and not there:
            message = f"data.partition is {kind!r}, but {setting} {missing}"
            raise ConfigError(message, setting=setting, value="", limit=f"set with data.partition = {kind!r}")


def diagnostics(config: Sections) -> None:
    """Refuse diagnostics of single clients where privacy or masks hide what single clients trained."""
    for name in config.evaluation.diagnostics:
        if name not in DIAGNOSTICS:
            allowed = ", ".join(DIAGNOSTICS)
            message = f"evaluation.diagnostics names {name!r}; it may name {allowed}"
            raise ConfigError(message, setting="evaluation.diagnostics", value=name, limit=f"one of {allowed}")
        if name not in LOCAL_DIAGNOSTICS:
            continue
        if config.privacy.unit != "none":
            _refuse(
                "evaluation.diagnostics",
                name,
                f"privacy.unit = {config.privacy.unit!r}",
                "it tells of what single clients trained, without noise",
            )
        if config.secure_aggregation.enabled:
            _refuse(
                "evaluation.diagnostics",
                name,
                "secure_aggregation.enabled = true",
                "it reads what single clients trained, and of them only the sum is to be known",
            )


def phantoms(config: Sections) -> None:
    """Refuse phantoms in a mean that is weighed by examples: a phantom has none."""
    if config.evaluation.phantoms and config.federation.weighting == "examples":
        _refuse(
            "evaluation.phantoms",
            config.evaluation.phantoms,
            "federation.weighting = 'examples'",
            "a phantom has no examples to be weighed by; set federation.weighting = 'uniform'",
        )


def privacy(config: Sections) -> None:
    """Refuse settings that would void the guarantee, or that leave it undefined."""
    privacy, federation = config.privacy, config.federation
    if privacy.unit == "none":
        return
    _require_a_guarantee(config)
    for name, refused, revealed in (
        ("federation.weighting", federation.weighting == "examples", "the number of a client's examples is private"),
        ("federation.nonfinite", federation.nonfinite == "fail", "a run that fails tells of one client"),
        ("evaluation.per_client", config.evaluation.per_client, "accuracy on private data would leave without noise"),
    ):
        if refused:
            section, _, setting = name.partition(".")
            _refuse(name, getattr(getattr(config, section), setting), f"privacy.unit = {privacy.unit!r}", revealed)
    if privacy.noise == "distributed":
        _distributed(config)
    if config.method.denoise == "shrink" and federation.server_optimizer != "mean" and _noised_sums(config):
        raise ConfigError(
            f"method.denoise = 'shrink' needs to know the noise, which federation.server_optimizer = "
            f"{federation.server_optimizer!r} changes: use 'mean', or method.denoise = 'truncate'",
            setting="federation.server_optimizer",
            value=federation.server_optimizer,
            limit="'mean' with method.denoise = 'shrink'",
        )


def _require_a_guarantee(config: Sections) -> None:
    privacy = config.privacy
    if privacy.epsilon is None and privacy.noise_multiplier is None:
        raise ConfigError(
            f"privacy.unit is {privacy.unit!r} without a guarantee: set privacy.epsilon, or privacy.noise_multiplier",
            setting="privacy.epsilon",
            limit="set, or privacy.noise_multiplier",
        )
    if privacy.unit == "group" and not privacy.group_column:
        raise ConfigError(
            "privacy.unit is 'group', but privacy.group_column names no column that says whose an example is",
            setting="privacy.group_column",
            value="",
            limit="the name of a column with privacy.unit = 'group'",
        )


def _distributed(config: Sections) -> None:
    privacy, sampling = config.privacy, config.federation.sampling
    if not config.secure_aggregation.enabled:
        raise ConfigError(
            "privacy.noise = 'distributed' is a share of noise from each client, which protects their sum alone: set "
            "secure_aggregation.enabled = true, or privacy.noise = 'local'",
            setting="secure_aggregation.enabled",
            value=False,
            limit="true with privacy.noise = 'distributed'",
        )
    if sampling == "poisson" and not privacy.hidden_cohort:
        _refuse(
            "federation.sampling",
            sampling,
            "privacy.noise = 'distributed'",
            "the server sees who takes part, so the coins protect nobody; set privacy.hidden_cohort = true, where each client "
            "tosses for itself",
        )
    if sampling == "fixed" and privacy.hidden_cohort:
        raise ConfigError(
            "federation.sampling = 'fixed' contradicts privacy.hidden_cohort = true, where each client tosses a coin of its "
            "own",
            setting="federation.sampling",
            value=sampling,
            limit="privacy.hidden_cohort = true",
        )


def _refuse(name: str, value: object, beside: str, why: str) -> NoReturn:
    """A setting's value that another setting excludes."""
    raise ConfigError(f"{name} = {value!r} is refused with {beside}: {why}", setting=name, value=value, limit=beside)


def _noised_sums(config: Sections) -> bool:
    """Whether noise is added to products that FRA averages."""
    return config.privacy.unit == "client" and config.method.name in ("fra_lora", "fra_then_ffa")
