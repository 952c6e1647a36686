"""The exact test of DAGER (Petrov et al. 2024, section 5.1) for LoRA (their appendix B.4): which inputs of a layer produced a
low-rank change of its weights.

For inputs X (b, n) of a layer W + s B A, and D (b, m) the gradients at its outputs,

    dL/dA = s B^T D^T X       its rows are in the span of the inputs, in R^n; zero while B = 0
    dL/dB = s D^T X A^T       its rows are in the span of the A x, in R^r

and the same holds for any sum of such gradients, as sent after local steps of SGD without weight decay. So a candidate e is
tested by its distance from the row space, |z - P z| / |z| with z = e or z = A e. The test is informative if the row space is
smaller than its surrounding space: b < r inputs for B. It misses nothing if the rows span all inputs: b <= r for A; over all
layers that read the same X, up to their total number of rows, about 3 r for query, key and value.

Rank. A change is a difference of parameters, known up to their rounding: `Rows.std` on a coordinate, u |after| with u = 2^-24.
Such noise has singular values of at most about std (sqrt(rows) + sqrt(n)), and only directions KEEP times above are certain. If
a direction of X is left out, the distance of members grows by their part in it; if a noise direction is kept, others lose one
dimension of their distance. So all of A's rows are kept, noise or not, as long as they fill at most three quarters of the
space. B's rows are not: they would fill all of it.

Tolerance. If no direction is lost, members of float32 changes have a distance of at most 1e-3 for A and 1e-4 for B, and the
nearest others 0.05 and 0.015 (one built-in note). So a candidate is certain within 0.03 for A and 0.005 for B, unless one of N
candidates would be as near by chance: the tolerance is at most N^(-1/c) if the row space lacks c dimensions, and 0 for c = 0.

Positions. If an input is the normalised sum of a token's and a position's embedding, the span of several texts contains false
candidates: with token v at positions i and j, and w at j, the input of w at i is in the span too. Its token is right and its
position is wrong, and the span cannot distinguish it from a true one. So for several texts tokens are recovered exactly, and
positions up to this ambiguity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEEP = 2.0
FILL = 0.75
MEMBER_A, MEMBER_B = 0.03, 0.005
NEAR = 0.3  # farther candidates are not even guesses
_LEAST = 1e-30  # for a change of zeros, which has no rounding
UNIT_ROUNDOFF = 2.0**-24  # of float32, the precision of parameters

Key = tuple[int, int]


@dataclass(frozen=True)
class Rows:
    """A change (rows, n) whose rows are in a span of inputs, up to noise with standard deviation `std` on each coordinate."""

    matrix: Tensor
    std: float

    @property
    def share(self) -> float:
        """The size of the noise relative to the change."""
        return self.std / max(_rms(self.matrix), _LEAST)


def rounding(change: Tensor, before: Tensor) -> float:
    """The error of a coordinate of a change of float32 parameters: the sum is rounded to u |after|, and the gradient was
    computed to a few u of its size. For a scaled change, `before` must be scaled too.
    """
    return UNIT_ROUNDOFF * math.hypot(_rms(before + change), 2 * _rms(change))


def row_space(parts: Sequence[Rows], most: int = 0) -> Tensor:
    """(R, n), orthonormal rows: the directions of all these rows that exceed their noise.

    most: the most directions that the rows can have; as many are kept, noise or not, unless they exceed a share FILL of the
    space.
    """
    whitened = torch.cat([part.matrix.double() / max(part.std, _LEAST) for part in parts])
    if not whitened.any():
        return whitened[:0]
    _, values, directions = torch.linalg.svd(whitened, full_matrices=False)
    limit = KEEP * (math.sqrt(whitened.shape[0]) + math.sqrt(whitened.shape[1]))
    loud = int((values > limit).sum())
    kept: Tensor = directions[: max(loud, min(most, int(FILL * whitened.shape[1])))]
    return kept


@dataclass(frozen=True)
class SpanTest:
    """One row space. through: (r, n), the map applied to candidates before the comparison; None for the identity.

    room: the dimension of the surrounding space.
    """

    basis: Tensor
    room: int
    tolerance: float
    through: Tensor | None = None

    @property
    def rank(self) -> int:
        return self.basis.shape[0]

    @property
    def missing(self) -> int:
        """The number of dimensions that the row space lacks; 0 for an empty row space, which shows nothing."""
        return self.room - self.rank if self.rank else 0

    def distances(self, inputs: Tensor) -> Tensor:
        """(N,) distances in [0, 1], relative to the candidate's length."""
        seen = inputs if self.through is None else inputs @ self.through.to(inputs.dtype).T
        basis, length = self.basis.to(seen.dtype), seen.norm(dim=1).clamp_min(1e-30)
        out = (seen - (seen @ basis.T) @ basis).norm(dim=1) / length
        close = out < 1e-2  # cancellation in float32 would matter here
        if seen.dtype != torch.float64 and close.any():
            out = out.double()
            out[close] = self.distances(inputs[close].double())
        far: Tensor = out.double()
        return far


@dataclass(frozen=True)
class Family:
    """Row spaces that all contain every true input."""

    name: str
    tests: tuple[SpanTest, ...]

    @property
    def rank(self) -> int:
        """The largest number of linearly independent inputs in all row spaces."""
        return max((test.rank for test in self.tests), default=0)

    @property
    def missing(self) -> int:
        return sum(test.missing for test in self.tests)

    @property
    def vacuous(self) -> bool:
        """Whether every candidate passes."""
        return self.missing == 0

    def tolerance(self, candidates: int) -> float:
        """The distance up to which an input is certain, if `candidates` are tried."""
        if self.vacuous:
            return 0.0
        return min(*(test.tolerance for test in self.tests), math.exp(-math.log(max(candidates, 1)) / self.missing))

    def distances(self, inputs: Tensor) -> Tensor:
        """(N,) the largest distance over all informative tests."""
        found = [test.distances(inputs) for test in self.tests if test.missing]
        return torch.stack(found).amax(0)


@dataclass(frozen=True)
class Found:
    """The remaining candidates of one family: keys (K, 2) of position and token, and distances (K,), below NEAR."""

    family: Family
    candidates: int
    keys: Tensor
    distances: Tensor

    def certain(self) -> set[Key]:
        """The candidates in the row space, nearest first: at most as many tokens as it has dimensions, because inputs of
        different tokens are linearly independent.
        """
        inside = self.distances < self.family.tolerance(self.candidates)
        order = self.distances[inside].argsort()
        found: set[Key] = set()
        tokens: set[int] = set()
        for position, token in self.keys[inside][order].tolist():
            tokens.add(token)
            if len(tokens) > self.family.rank:
                break
            found.add((position, token))
        return found

    def nearest(self, each: int) -> set[Key]:
        """Guesses for a row space that contains inputs only in part: at each position the `each` nearest tokens."""
        chosen: dict[int, set[int]] = {}
        for index in self.distances.argsort().tolist():
            position, token = self.keys[index].tolist()
            if len(chosen.setdefault(position, set())) < each:
                chosen[position].add(token)
        return {(position, token) for position, tokens in chosen.items() for token in tokens}


def search(blocks: Iterable[tuple[Tensor, Tensor]], families: Sequence[Family]) -> list[Found]:
    """The remaining candidates of each family, from blocks of keys (N, 2) and inputs (N, n)."""
    total = 0
    kept: list[list[tuple[Tensor, Tensor]]] = [[] for _ in families]
    for keys, inputs in blocks:
        total += len(keys)
        for family, mine in zip(families, kept, strict=True):
            if not family.vacuous:
                distances = family.distances(inputs)
                near = distances < NEAR
                mine.append((keys[near], distances[near]))
    empty = (torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, dtype=torch.float64))
    joined = [tuple(map(torch.cat, zip(*mine, strict=True))) if mine else empty for mine in kept]
    return [Found(family, total, keys, far) for family, (keys, far) in zip(families, joined, strict=True)]


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
