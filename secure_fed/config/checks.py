"""Settings that require or exclude others: the partition of the data, diagnostics, phantoms and privacy."""

from __future__ import annotations

from typing import Any, NoReturn

from secure_fed.config.sections import DIAGNOSTICS, LOCAL_DIAGNOSTICS, Sections
from secure_fed.errors import ConfigError


def together(config: Sections) -> None:
    """Refuse settings that contradict each other."""
    _federation(config)
    _privacy(config)
    if config.evaluation.phantoms and config.federation.weighting == "examples":
        why = "a phantom has no examples to be weighted by; set federation.weighting = 'uniform'"
        _refuse(config, "evaluation.phantoms", "federation.weighting = 'examples'", why)
    _partition(config)
    _diagnostics(config)
    if config.training.lr_warmup >= config.federation.rounds:
        message = (
            f"training.lr_warmup is {config.training.lr_warmup}, not below federation.rounds = {config.federation.rounds}: "
            "lower it, or raise federation.rounds"
        )
        _wrong(config, "training.lr_warmup", "below federation.rounds", message)


def value_of(config: Sections, name: str) -> Any:
    """The value of `section.key`."""
    section, _, setting = name.partition(".")
    return getattr(getattr(config, section), setting)


def _wrong(config: Sections, name: str, limit: str, message: str) -> NoReturn:
    raise ConfigError(message, setting=name, value=value_of(config, name), limit=limit)


def _refuse(config: Sections, name: str, beside: str, why: str) -> NoReturn:
    """Refuse a setting's value that another setting excludes."""
    _wrong(config, name, beside, f"{name} = {value_of(config, name)!r} is refused with {beside}: {why}")


def _federation(config: Sections) -> None:
    federation = config.federation
    if federation.clients and federation.cohort and federation.cohort > federation.clients:
        message = (
            f"federation.cohort is {federation.cohort}, more than federation.clients = {federation.clients}: lower it"
        )
        _wrong(config, "federation.cohort", f"at most {federation.clients}", message)
    last, rounds = federation.averaged, federation.rounds
    if last > rounds:
        message = f"federation.average_last is {last}, more than federation.rounds = {rounds}: take {rounds} or less"
        _wrong(config, "federation.average_last", f"at most {rounds}", message)
    if last > 1 and config.evaluation.patience is not None:
        why = "a run that may end early does not know which rounds are its last; unset one of the two"
        _refuse(config, "federation.average_last", f"evaluation.patience = {config.evaluation.patience}", why)
    if federation.aggregate != "mean":
        _robust(config)
    if config.method.transport_form == "sketch" and federation.optimizer != "mean":
        _wrong(
            config,
            "federation.server_optimizer",
            "'mean' with method.transport_form = 'sketch'",
            f"federation.server_optimizer = {federation.server_optimizer!r} adds up means of several rounds, whose sketches "
            "span different columns: use 'mean', or method.transport_form = 'dense'",
        )


def _robust(config: Sections) -> None:
    """Refuse medians and trimmed means with settings under which they are impossible, unsafe or meaningless."""
    for beside, refused, why in (
        (
            "secure_aggregation.enabled = true",
            config.secure_aggregation.enabled,
            "the server sees only sums, which it can bound only as a whole (docs/bounding_inputs.md); use 'mean'",
        ),
        (
            "privacy.unit = 'client'",
            config.privacy.unit == "client",
            "one client may move a median by more than the clip norm, so the noise would not cover it; clipping already "
            "bounds each client; use 'mean'",
        ),
        (
            "federation.weighting = 'examples'",
            config.federation.weighting == "examples",
            "each client reports its own example count; set federation.weighting = 'uniform'",
        ),
        (
            "method.transport_form = 'sketch'",
            config.method.transport_form == "sketch",
            "a median of sketches is no sketch of a median; set method.transport_form = 'dense'",
        ),
        ("evaluation.phantoms", bool(config.evaluation.phantoms), "phantoms are scored by sums; use 'mean'"),
        (
            "a cohort of fewer than 3 clients",
            min(config.federation.cohort or 3, config.federation.clients or 3) < 3,
            "of two changes neither can be identified as the outlier; raise federation.cohort",
        ),
    ):
        if refused:
            _refuse(config, "federation.aggregate", beside, why)


def _partition(config: Sections) -> None:
    """Refuse a partition without the column or matrix that it needs."""
    data = config.data
    for kind, setting, there, missing in (
        (
            "natural",
            "client",
            data.client or isinstance(data.train, tuple),
            "names no column with the client of each row",
        ),
        ("language", "language", data.language, "names no column with the language of each row"),
        ("matrix", "matrix", data.matrix, "gives no shares of the labels"),
    ):
        if data.partition == kind and not there:
            message = f"data.partition is {kind!r}, but data.{setting} {missing}"
            _wrong(config, f"data.{setting}", f"set with data.partition = {kind!r}", message)


def _diagnostics(config: Sections) -> None:
    """Refuse diagnostics of single clients where privacy or masks hide single clients' updates."""
    private, masked = config.privacy.unit != "none", config.secure_aggregation.enabled
    for name in config.evaluation.diagnostics:
        if name not in DIAGNOSTICS:
            limit = f"one of {', '.join(DIAGNOSTICS)}"
            message = f"evaluation.diagnostics names {name!r}; it must be one of {', '.join(DIAGNOSTICS)}"
        elif name in LOCAL_DIAGNOSTICS and (private or masked):
            limit = f"privacy.unit = {config.privacy.unit!r}" if private else "secure_aggregation.enabled = true"
            why = (
                "it reveals single clients' updates, without noise"
                if private
                else "it reads single clients' updates, and the server may learn only their sum"
            )
            message = f"evaluation.diagnostics = {name!r} is refused with {limit}: {why}"
        else:
            continue
        raise ConfigError(message, setting="evaluation.diagnostics", value=name, limit=limit)


def _privacy(config: Sections) -> None:
    """Refuse settings that would void the guarantee, or that leave it undefined."""
    privacy, federation = config.privacy, config.federation
    if privacy.unit == "none":
        return
    if privacy.epsilon is None and privacy.noise_multiplier is None:
        message = (
            f"privacy.unit is {privacy.unit!r} without a guarantee: set privacy.epsilon, or privacy.noise_multiplier"
        )
        _wrong(config, "privacy.epsilon", "set, or privacy.noise_multiplier", message)
    if privacy.unit == "group" and not privacy.group_column:
        message = "privacy.unit is 'group', but privacy.group_column names no column with the person of each example"
        _wrong(config, "privacy.group_column", "the name of a column with privacy.unit = 'group'", message)
    for name, refused, revealed in (
        ("federation.weighting", federation.weighting == "examples", "the number of a client's examples is private"),
        ("federation.nonfinite", federation.nonfinite == "fail", "a failed run reveals something about one client"),
        (
            "evaluation.per_client",
            config.evaluation.per_client,
            "accuracy on private data would be published without noise",
        ),
    ):
        if refused:
            _refuse(config, name, f"privacy.unit = {privacy.unit!r}", revealed)
    if privacy.noise == "distributed":
        _distributed(config)
    if privacy.correlation == "banded":
        _correlated(config)
    if privacy.unit == "client":
        require_small_delta(config, config.federation.clients or 1)  # before data are read, if their number is known
        _denoising(config)


def require_small_delta(config: Sections, units: int) -> None:
    """Refuse a delta of one over the number of units: it allows revealing one unit completely."""
    delta = config.privacy.delta
    if delta * units >= 1:
        message = (
            f"privacy.delta is {delta:g}, no less than one over {units} units, so that it would allow publishing one of them: "
            f"set it well below {1 / units:.2g}"
        )
        _wrong(config, "privacy.delta", f"below {1 / units:.2g}", message)


def _denoising(config: Sections) -> None:
    """Refuse shrinkage where the noise does not have one known level on every entry."""
    method, optimizer = config.method, config.federation.server_optimizer
    fra = method.name in ("fra_lora", "fra_then_ffa") or (method.name, method.rule) == ("federa", "fra_lora")
    if fra and method.denoise == "shrink" and optimizer == "adam":
        _wrong(
            config,
            "federation.server_optimizer",
            "'mean' or 'momentum' with method.denoise = 'shrink'",
            "method.denoise = 'shrink' needs one noise level, but federation.server_optimizer = 'adam' scales each entry "
            "differently: use 'mean' or 'momentum', or method.denoise = 'tangent'",
        )
    if method.denoise_over == "sum" and method.transport_form == "sketch":
        why = "the sketches of different rounds span different columns, so their sum has no single noise level"
        _refuse(config, "method.denoise_over", "method.transport_form = 'sketch'", why + "; use 'mean', or 'dense'")


def _distributed(config: Sections) -> None:
    hidden, sampling = config.privacy.hidden_cohort, config.federation.sampling
    if not config.secure_aggregation.enabled:
        _wrong(
            config,
            "secure_aggregation.enabled",
            "true with privacy.noise = 'distributed'",
            "privacy.noise = 'distributed' adds a share of the noise at each client, which protects only their sum: set "
            "secure_aggregation.enabled = true, or privacy.noise = 'local'",
        )
    if sampling == "poisson" and not hidden:
        why = (
            "the server sees who takes part, so the coins protect nobody; set privacy.hidden_cohort = true, with which each "
            "client tosses its own coin"
        )
        _refuse(config, "federation.sampling", "privacy.noise = 'distributed'", why)
    if sampling in ("fixed", "schedule") and hidden:
        contradicts = "contradicts privacy.hidden_cohort = true, with which each client tosses its own coin"
        message = f"federation.sampling = {sampling!r} {contradicts}"
        _wrong(config, "federation.sampling", "privacy.hidden_cohort = true", message)


def _correlated(config: Sections) -> None:
    """Refuse correlated noise where the run is not a single Gaussian mechanism, or where no party can cancel earlier noise."""
    privacy = config.privacy
    for name, refused, why in (
        (
            "federation.sampling",
            config.federation.sampling not in ("auto", "schedule"),
            "its bound needs a known distance between a client's rounds; set federation.sampling = 'schedule'",
        ),
        (
            "privacy.noise",
            privacy.noise not in ("auto", "central"),
            "the clients of a round do not know the noise of earlier rounds, so cannot cancel it; set privacy.noise = "
            "'central'",
        ),
        (
            "privacy.clip_quantile",
            privacy.clip_quantile is not None,
            "noise that follows a changing clip norm does not cancel in sums, and the bound is for one norm; leave it out",
        ),
        (
            "method.transport_form",
            config.method.transport_form == "sketch",
            "the sketches of two rounds span different columns, so the noise of one does not cancel in the other; set "
            "method.transport_form = 'dense'",
        ),
    ):
        if refused:
            _refuse(config, name, f"privacy.correlation = {privacy.correlation!r}", why)
