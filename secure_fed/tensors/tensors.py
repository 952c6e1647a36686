"""Named tensors as a vector space; their layout as one flat vector, and their length in bytes.

Messages and sums are `Tensors`: a read-only map from name to tensor, names sorted, with `+`, `-`, `* scalar`, `select`, `|` and
`norm()`. A member may be a `LowRank` product, which stays a pair of factors until the dense matrix is needed; its norm never
needs it. A `Layout` gives a flat vector its meaning: names and shapes, with a digest by which both ends of a wire check that
they mean the same coordinates.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from functools import cached_property, lru_cache

import safetensors.torch
import torch
from torch import Tensor

from secure_fed.errors import SecureFedError

_LEFT, _RIGHT = "#left", "#right"


@dataclass(frozen=True, eq=False)
class LowRank:
    """The m x n matrix `left @ right`, kept as its factors.

    left: (m, k), right: (k, n). Sums concatenate factors, so k grows by addition and nothing is ever rounded.
    """

    left: Tensor
    right: Tensor

    def __post_init__(self) -> None:
        if self.left.ndim != 2 or self.right.ndim != 2 or self.left.shape[1] != self.right.shape[0]:
            raise ValueError(
                f"factors of shapes {tuple(self.left.shape)} and {tuple(self.right.shape)} do not multiply"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.left.shape[0], self.right.shape[1])

    @property
    def rank(self) -> int:
        """The inner size k: an upper bound on the rank of the product."""
        return self.left.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def __add__(self, other: LowRank) -> LowRank:
        return LowRank(torch.cat([self.left, other.left], 1), torch.cat([self.right, other.right], 0))

    def __mul__(self, scalar: float) -> LowRank:
        return LowRank(self.left * scalar, self.right)

    def dense(self) -> Tensor:
        """The product itself: (m, n)."""
        return self.left @ self.right

    def square_norm(self) -> float:
        """||L R||_F^2 = <L^T L, R R^T>, in float64 and without forming m x n."""
        left, right = self.left.double(), self.right.double()
        return float(((left.T @ left) * (right @ right.T)).sum())


Member = Tensor | LowRank


def is_finite(part: Tensor) -> bool:
    """True if every number is finite. A sum of finite numbers may overflow; then the least and the largest decide."""
    if math.isfinite(part.sum()):
        return True
    low, high = torch.aminmax(part)
    return math.isfinite(low) and math.isfinite(high)


def dense(member: Member, dtype: torch.dtype | None = None) -> Tensor:
    """The member as one ordinary tensor, computed in `dtype` if given."""
    if isinstance(member, LowRank):
        return member.left.to(dtype=dtype) @ member.right.to(dtype=dtype)
    return member if dtype is None else member.to(dtype=dtype)


def _add(a: Member, b: Member) -> Member:
    if isinstance(a, LowRank) and isinstance(b, LowRank):
        return a + b
    return dense(a) + dense(b)


class Tensors(Mapping[str, Member]):
    """A read-only, name-sorted map of tensors; arithmetic needs equal names on both sides."""

    __slots__ = ("_members", "_wire_size")

    def __init__(self, members: Mapping[str, Member] | Iterable[tuple[str, Member]] = ()) -> None:
        given = dict(members)
        names = sorted(given)
        self._members: dict[str, Member] = given if names == list(given) else {name: given[name] for name in names}
        self._wire_size: int | None = None

    def _renewed(self, members: Iterable[Member]) -> Tensors:
        """Other tensors under the same names, which need no sorting again."""
        made = Tensors()
        made._members = dict(zip(self._members, members, strict=True))
        return made

    def __getitem__(self, name: str) -> Member:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    # The inherited views call `__getitem__` for every name, which is slow in a round of many tensors.
    def keys(self) -> KeysView[str]:
        return self._members.keys()

    def values(self) -> ValuesView[Member]:
        return self._members.values()

    def items(self) -> ItemsView[str, Member]:
        return self._members.items()

    def __repr__(self) -> str:
        return f"Tensors({len(self)} named, {self.numel} numbers)"

    def __add__(self, other: Tensors) -> Tensors:
        return self._with(other, torch._foreach_add, _add)

    def __sub__(self, other: Tensors) -> Tensors:
        return self._with(other, torch._foreach_sub, lambda a, b: _add(a, b * -1.0))

    def __mul__(self, scalar: float) -> Tensors:
        if (own := self._plain()) is not None:
            return self._renewed(torch._foreach_mul(own, scalar))
        return Tensors((name, member * scalar) for name, member in self.items())

    __rmul__ = __mul__

    def __or__(self, other: Mapping[str, Member]) -> Tensors:
        """These tensors and `other`'s; `other`'s where both have the name."""
        return Tensors({**self._members, **other}) if other else self

    def select(self, names: Iterable[str]) -> Tensors:
        return Tensors({name: self._members[name] for name in names})

    def without(self, names: Iterable[str]) -> Tensors:
        left_out = set(names)
        return Tensors({name: member for name, member in self.items() if name not in left_out})

    def tensor(self, name: str) -> Tensor:
        """The named member as one ordinary tensor."""
        return dense(self[name])

    def dense(self) -> Tensors:
        """The same tensors, with every low-rank product computed."""
        return Tensors((name, dense(member)) for name, member in self.items())

    def norm(self) -> float:
        """The Frobenius norm of everything together, in float64; NaN or infinite if anything inside is."""
        square = sum(
            part.square_norm()
            if isinstance(part, LowRank)
            else float(torch.linalg.vector_norm(part, dtype=torch.float64)) ** 2
            for part in self.values()
        )
        return math.sqrt(square) if square >= 0 else math.nan

    def is_finite(self) -> bool:
        return all(is_finite(part) for part in self.parts().values())

    @property
    def numel(self) -> int:
        """The number of stored entries (factors, not products)."""
        return sum(part.numel() for part in self.parts().values())

    def parts(self) -> dict[str, Tensor]:
        """Plain tensors only: a low-rank member appears as its two factors."""
        out: dict[str, Tensor] = {}
        for name, member in self.items():
            if isinstance(member, LowRank):
                out[name + _LEFT], out[name + _RIGHT] = member.left, member.right
            else:
                out[name] = member
        return out

    @classmethod
    def from_parts(cls, parts: Mapping[str, Tensor]) -> Tensors:
        """The inverse of `parts`."""
        members: dict[str, Member] = {}
        for name, part in parts.items():
            if name.endswith(_LEFT):
                stem = name.removesuffix(_LEFT)
                members[stem] = LowRank(part, parts[stem + _RIGHT])
            elif not name.endswith(_RIGHT):
                members[name] = part
        return cls(members)

    def to_bytes(self) -> bytes:
        """The wire form: safetensors of `parts`."""
        return safetensors.torch.save({name: part.contiguous() for name, part in self.parts().items()})

    @classmethod
    def from_bytes(cls, data: bytes) -> Tensors:
        return cls.from_parts(safetensors.torch.load(data))

    @property
    def wire_size(self) -> int:
        """`len(self.to_bytes())`, without copying the numbers: it depends on names, shapes and dtypes alone."""
        if self._wire_size is None:
            self._wire_size = wire_size(tuple([(name, part.shape, part.dtype) for name, part in self.parts().items()]))
        return self._wire_size

    def _with(
        self,
        other: Tensors,
        at_once: Callable[[list[Tensor], list[Tensor]], Iterable[Tensor]],
        each: Callable[[Member, Member], Member],
    ) -> Tensors:
        """Both combined name by name: plain tensors in one call (`at_once`), and with low-rank members one by one (`each`)."""
        if self._members.keys() != other._members.keys():
            odd = sorted(self._members.keys() ^ other._members.keys())
            raise ValueError(f"tensors of different names cannot be combined; only one side has {odd[:3]}")
        left, right = self._plain(), other._plain()
        if left is None or right is None:
            return Tensors((name, each(self[name], other[name])) for name in self)
        return self._renewed(at_once(left, right))

    def _plain(self) -> list[Tensor] | None:
        """The members, if there are any and all of them are plain tensors."""
        members = [member for member in self.values() if isinstance(member, Tensor)]
        return members if members and len(members) == len(self) else None


class LayoutError(SecureFedError):
    """The two ends of a wire do not mean the same coordinates."""


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


# The names of types in safetensors, in the order in which it puts them into a file.
_TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PLACES = {dtype: place for place, dtype in enumerate(_TYPES)}


@lru_cache(maxsize=256)
def wire_size(parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> int:
    """The size in bytes of the safetensors file that the library writes for tensors of these (name, shape, type).

    No weights are needed. The file is eight bytes, a JSON header padded to a multiple of eight, and the numbers. The header
    gives each tensor's type, shape and offsets; tensors are ordered by type and then by name.
    """
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, shape, dtype in sorted(parts, key=lambda part: (_PLACES[part[2]], part[0])):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return 8 + -(-len(text) // 8) * 8 + end
