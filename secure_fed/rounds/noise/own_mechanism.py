"""The checks of a user's own mechanism. That `noised` adds the noise of its event cannot be checked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from privacy.mechanisms import Mechanism
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError
from secure_fed.tensors.tensors import Layout, Tensors


def require_made(mechanism: Callable[[float], Mechanism]) -> None:
    """Refuse a function that makes no mechanism from a noise multiplier, or one that bounds too small a norm for its event.

    |x|_p falls as p grows: a bound on the L1 norm bounds the L2 norm too, and not the reverse.
    """
    name = getattr(mechanism, "__name__", repr(mechanism))
    try:
        made: Any = mechanism(1.0)
    except TypeError as error:
        why = f"cannot be made of a noise multiplier ({error}): give the class, as in mechanism=Laplace"
        raise _wrong(name, why) from error
    if not isinstance(made, Mechanism):
        raise _wrong(name, f"makes {type(made).__name__}, which is no privacy.mechanisms.Mechanism")
    event, order = type(made.event).__name__, made.order
    if not (isinstance(order, int | float) and order >= 1):
        raise _wrong(name, f"has order {order!r}, but it is p of a norm, so a number of at least 1")
    if order > _ORDER_OF.get(event, math.inf):
        raise _wrong(
            name,
            f"bounds contributions in the L{order:g} norm, and its event, {event}, is about a shift of bounded "
            f"L{_ORDER_OF[event]:g} norm: set order = {_ORDER_OF[event]:.1f} in the class",
        )


def require_whole(mechanism: Mechanism, total: Mapping[str, Tensor], noised: Any) -> None:
    """Refuse a noised sum that lacks a tensor of the sum, has an additional one, or one of another shape."""
    name = f"{type(mechanism).__name__}.noised"
    if not isinstance(noised, Mapping):
        raise _wrong(name, f"returns {type(noised).__name__}, and not the tensors of the sum by name")
    if odd := Layout.of(Tensors(noised)).differing(Layout.of(Tensors(total))):
        raise _wrong(name, f"does not return the tensors of the sum: {odd}")


def require_open_sums(config: RunConfig, passes: int) -> None:
    """Refuse a user's own mechanism where its event does not determine the cost of a release."""
    privacy, sampling = config.privacy, config.federation.sampling
    for setting, value, refused, limit in (
        ("privacy.unit", privacy.unit, privacy.unit != "client", "'client'"),
        ("privacy.noise", privacy.noise, privacy.noise != "central", "'central'"),
        ("privacy.clip_quantile", privacy.clip_quantile, privacy.clip_quantile is not None, "not set"),
        ("federation.sampling", sampling, sampling in ("fixed", "schedule"), "'poisson'"),
        ("secure_aggregation.enabled", True, config.secure_aggregation.enabled, "false"),
        ("method.name", config.method.name, passes > 1, "a method of one pass a round"),
    ):
        if refused:
            raise ConfigError(
                f"{setting} = {value!r} is refused with a mechanism of your own, which can noise only one unmasked sum a "
                f"round, over clients drawn by coins: set it to {limit}"
            ).about(setting, value, f"{limit} with a mechanism of your own")


def _wrong(name: str, why: str) -> ConfigError:
    return ConfigError(f"the mechanism {name} {why}").about(
        "mechanism", name, "as docs/adding_a_mechanism.md describes"
    )


_ORDER_OF = {"LaplaceDpEvent": 1.0, "GaussianDpEvent": 2.0}  # the order of the norm between an event's two sums
