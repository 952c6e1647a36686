"""Checksums of parameters, which show whether a forward or backward pass has changed one.

Some layers write to their parameters as they run: an embedding with `max_norm` shortens the rows of a batch's tokens, others
keep a mean of their inputs in a frozen parameter. No noise covers such a change. torch counts the changes of a tensor, but not
those by way of `.data`, and a copy of all parameters would double a model's memory. A checksum costs one reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor


def checksums(named: Mapping[str, Tensor]) -> dict[str, int]:
    """By name, sum_i r_i b_i mod 2^64 over a tensor's bits b_i, taken as whole numbers, with fixed random weights r_i.

    Changes of values, signs, scale and order change the sum, up to coincidences of one in billions.
    """
    found = {name: _weighted(tensor.detach()) for name, tensor in named.items()}
    places = {one.device for one in found.values()}
    read = {place: iter(_read([one for one in found.values() if one.device == place])) for place in places}
    return {name: next(read[one.device]) for name, one in found.items()}


def changed(before: Mapping[str, int], named: Mapping[str, Tensor]) -> list[str]:
    """The names of tensors that differ from their checksums, or have none."""
    return [name for name, found in checksums(named).items() if before.get(name) != found]


def row_checksums(tensor: Tensor) -> list[int]:
    """The same sum for each row of a tensor (B, ...)."""
    bits = tensor.contiguous().flatten(1).view(_WHOLE.get(tensor.element_size(), torch.int32))  # (B, n)
    weights, n = _weights(tensor.device), bits.shape[1]
    sums = [(part * weights[: part.shape[1]]).sum(1) for part in bits.split(len(weights), 1)] if n else []
    turned = [one * weights[at % len(weights)] for at, one in enumerate(sums)] if len(sums) > 1 else sums
    found: list[int] = torch.stack(turned).sum(0).tolist() if turned else [0] * len(tensor)
    return found


def _read(sums: list[Tensor]) -> list[int]:
    """The sums of one device as numbers; a GPU is waited for once."""
    return torch.stack(sums).tolist()


def _weighted(tensor: Tensor) -> Tensor:
    """() int64. The bits are read by 32, so that no weight's product loses the highest ones, and a part at a time."""
    kind = _WHOLE.get(tensor.element_size(), torch.int32)
    bits, weights = tensor.contiguous().reshape(-1).view(kind), _weights(tensor.device)
    sums = [(part * weights[: len(part)]).sum() for part in bits.split(len(weights))]
    return sums[0] if len(sums) == 1 else (torch.stack(sums) * weights[: len(sums)]).sum()


@cache
def _weights(device: torch.device) -> Tensor:
    count = _PART if device.type == "cpu" else _ELSEWHERE
    limits = torch.iinfo(torch.int64)
    return torch.randint(limits.min, limits.max, (count,), generator=torch.Generator().manual_seed(0)).to(device)


_WHOLE = {1: torch.uint8, 2: torch.int16}
_PART, _ELSEWHERE = 2**16, 2**22  # numbers at once: on a CPU, more leave its cache
