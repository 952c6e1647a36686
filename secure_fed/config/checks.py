"""Settings that need others beside them, or exclude them: of the division of data, of diagnostics, and of privacy."""

from __future__ import annotations

from secure_fed.config.sections import DIAGNOSTICS, LOCAL_DIAGNOSTICS, DataConfig, Sections
from secure_fed.errors import ConfigError


def partition(data: DataConfig) -> None:
    """Refuse a division that lacks what it goes by."""
    if data.partition == "natural" and not data.client and not isinstance(data.train, tuple):
        raise ConfigError("data.partition is 'natural', but data.client names no column that says whose each row is")
    if data.partition == "language" and not data.language:
        raise ConfigError(
            "data.partition is 'language', but data.language names no column that says what one a row is in"
        )
    if data.partition == "matrix" and not data.matrix:
        raise ConfigError("data.partition is 'matrix', but data.matrix says no client's share of any label")


def diagnostics(config: Sections) -> None:
    """Refuse to look at single clients where they are protected from just that."""
    for name in config.evaluation.diagnostics:
        if name not in DIAGNOSTICS:
            raise ConfigError(f"evaluation.diagnostics names {name!r}; it may name {', '.join(DIAGNOSTICS)}")
        if name not in LOCAL_DIAGNOSTICS:
            continue
        if config.privacy.unit != "none":
            raise ConfigError(
                f"evaluation.diagnostics = {name!r} is refused with privacy.unit = {config.privacy.unit!r}: it tells of what "
                "single clients trained, without noise"
            )
        if config.secure_aggregation.enabled:
            raise ConfigError(
                f"evaluation.diagnostics = {name!r} is refused with secure_aggregation.enabled = true: it reads what single "
                "clients trained, and of them only the sum is to be known"
            )


def phantoms(config: Sections) -> None:
    """Refuse phantoms whose weight in a mean nobody could say."""
    if config.evaluation.phantoms and config.federation.weighting == "examples":
        raise ConfigError(
            f"evaluation.phantoms = {config.evaluation.phantoms} is refused with federation.weighting = 'examples': a phantom "
            "has no examples to be weighed by; set federation.weighting = 'uniform'"
        )


def privacy(config: Sections) -> None:
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
        _distributed(config)
    if config.method.denoise == "shrink" and config.federation.server_optimizer != "mean" and _noised_sums(config):
        raise ConfigError(
            f"method.denoise = 'shrink' needs to know the noise, which federation.server_optimizer = "
            f"{federation.server_optimizer!r} changes: use 'mean', or method.denoise = 'truncate'"
        )


def _distributed(config: Sections) -> None:
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


def _noised_sums(config: Sections) -> bool:
    """Whether noise is added to products that FRA averages."""
    return config.privacy.unit == "client" and config.method.name in ("fra_lora", "fra_then_ffa")
