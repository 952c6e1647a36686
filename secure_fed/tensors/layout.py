"""The layout that gives a flat vector its meaning: names and shapes, with a digest.

By the digest both ends of a wire check that they mean the same coordinates.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from secure_fed.errors import SecureFedError
from secure_fed.tensors.tensors import Tensors, dense


@dataclass(frozen=True)
class Layout:
    """The named tensors that a flat vector holds, in name order: (name, shape) of each."""

    entries: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, tensors: Tensors) -> Layout:
        return cls(tuple([(name, tuple(member.shape)) for name, member in tensors.items()]))

    @cached_property
    def size(self) -> int:
        return sum(math.prod(shape) for _, shape in self.entries)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the entries: equal exactly when both ends mean the same vector."""
        return _digest(self.entries)

    def fits(self, tensors: Tensors) -> bool:
        """True if `tensors` have this layout: `Layout.of(tensors) == self`."""
        names, shapes = self._columns
        return list(tensors) == names and [member.shape for member in tensors.values()] == shapes

    def differing(self, expected: Layout) -> str:
        """The first tensor that differs from `expected`, in words; empty if there is none."""
        own, other = dict(self.entries), dict(expected.entries)
        for name in sorted(own.keys() | other.keys()):
            if name not in own:
                return f"{name!r} is missing"
            if name not in other:
                return f"{name!r} is one more"
            if own[name] != other[name]:
                return f"{name!r} has shape {own[name]} in place of {other[name]}"
        return ""

    @cached_property
    def _columns(self) -> tuple[list[str], list[tuple[int, ...]]]:
        return [name for name, _ in self.entries], [shape for _, shape in self.entries]

    def flatten(self, tensors: Tensors, dtype: torch.dtype = torch.float32) -> Tensor:
        """One vector (size,) of type `dtype`, in which low-rank products are computed; refuses tensors of another layout."""
        if not self.fits(tensors):
            raise LayoutError(
                f"expected the layout {self.digest[:12]}, got tensors laid out as {Layout.of(tensors).digest[:12]}"
            )
        if not self.entries:
            return torch.zeros(0, dtype=dtype)
        return torch.cat([dense(tensors[name], dtype).reshape(-1) for name, _ in self.entries])

    def unflatten(self, vector: Tensor) -> Tensors:
        """The inverse of `flatten`; the tensors are views of the vector."""
        if vector.shape != (self.size,):
            raise LayoutError(f"expected a vector of {self.size} numbers, got shape {tuple(vector.shape)}")
        chunks = vector.split([math.prod(shape) for _, shape in self.entries])
        return Tensors((name, chunk.view(shape)) for (name, shape), chunk in zip(self.entries, chunks, strict=True))


@lru_cache(maxsize=64)
def _digest(entries: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


class LayoutError(SecureFedError):
    """The two ends of a wire do not mean the same coordinates."""
