"""Weights of classes from public shares."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from secure_fed.errors import ConfigError

_ROUNDED = 0.01  # what the shares' sum may lack for having been rounded


def weights(priors: Sequence[str] | Sequence[float], label_names: Sequence[str]) -> Tensor:
    """(classes,) of 1 / (classes * share): of mean one under the shares.

    priors: a share for every class in the order of `label_names`, or "name=share" in any order.
    """
    shares = [_share(prior) for prior in priors]
    names = [name for name, _ in shares]
    if None in names and any(name is not None for name in names):
        raise ConfigError(
            f"data.class_priors is {list(priors)}; give a share of every class in their order, or 'name=share' of every one"
        )
    expected = [None] * len(label_names) if None in names else sorted(label_names)
    if (names if None in names else sorted(map(str, names))) != expected:
        raise ConfigError(
            f"data.class_priors is {list(priors)!r:.200}, but the {len(label_names)} classes are "
            f"{', '.join(label_names)!r:.200}; give each of them one share"
        )
    total = sum(share for _, share in shares)
    if abs(total - 1) > _ROUNDED:
        raise ConfigError(f"the shares of data.class_priors add up to {total:g}; make them add up to 1")
    named = dict(shares)
    in_order = [share for _, share in shares] if None in names else [named[name] for name in label_names]
    return torch.tensor([1 / (len(in_order) * share) for share in in_order])


def _share(prior: str | float) -> tuple[str | None, float]:
    name, equals, text = prior.rpartition("=") if isinstance(prior, str) else ("", "", str(prior))
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise ConfigError(f"data.class_priors holds {prior!r}; give a share above 0 and at most 1, or 'name=share'")
    return (name.strip() if equals else None), share
