"""Settings that would void a privacy guarantee, or leave it undefined."""

from __future__ import annotations

from secure_fed.config.refusals import refuse, wrong
from secure_fed.config.sections import Sections


def check(config: Sections) -> None:
    """Refuse settings that would void the guarantee, or that leave it undefined."""
    privacy, federation = config.privacy, config.federation
    if privacy.unit == "none":
        return
    if privacy.epsilon is None and privacy.noise_multiplier is None:
        message = (
            f"privacy.unit is {privacy.unit!r} without a guarantee: set privacy.epsilon, or privacy.noise_multiplier"
        )
        wrong(config, "privacy.epsilon", "set, or privacy.noise_multiplier", message)
    if privacy.unit == "group" and not privacy.group_column:
        message = "privacy.unit is 'group', but privacy.group_column names no column with the person of each example"
        wrong(config, "privacy.group_column", "the name of a column with privacy.unit = 'group'", message)
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
            refuse(config, name, f"privacy.unit = {privacy.unit!r}", revealed)
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
        wrong(config, "privacy.delta", f"below {1 / units:.2g}", message)


def _denoising(config: Sections) -> None:
    """Refuse shrinkage where the noise does not have one known level on every entry."""
    method, optimizer = config.method, config.federation.server_optimizer
    fra = method.name in ("fra_lora", "fra_then_ffa") or (method.name, method.rule) == ("federa", "fra_lora")
    if fra and method.denoise == "shrink" and optimizer == "adam":
        wrong(
            config,
            "federation.server_optimizer",
            "'mean' or 'momentum' with method.denoise = 'shrink'",
            "method.denoise = 'shrink' needs one noise level, but federation.server_optimizer = 'adam' scales each entry "
            "differently: use 'mean' or 'momentum', or method.denoise = 'tangent'",
        )
    if method.denoise_over == "sum" and method.transport_form == "sketch":
        why = "the sketches of different rounds span different columns, so their sum has no single noise level"
        refuse(config, "method.denoise_over", "method.transport_form = 'sketch'", why + "; use 'mean', or 'dense'")


def _distributed(config: Sections) -> None:
    hidden, sampling = config.privacy.hidden_cohort, config.federation.sampling
    if not config.secure_aggregation.enabled:
        wrong(
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
        refuse(config, "federation.sampling", "privacy.noise = 'distributed'", why)
    if sampling in ("fixed", "schedule") and hidden:
        contradicts = "contradicts privacy.hidden_cohort = true, with which each client tosses its own coin"
        message = f"federation.sampling = {sampling!r} {contradicts}"
        wrong(config, "federation.sampling", "privacy.hidden_cohort = true", message)


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
            refuse(config, name, f"privacy.correlation = {privacy.correlation!r}", why)
