"""The exact test of DAGER (Petrov et al. 2024, section 5.1) for LoRA (their appendix B.4): which inputs of a layer produced a
low-rank change of its weights.

For inputs X (b, n) of a layer W + s B A, and D (b, m) the gradients at its outputs,

    dL/dA = s B^T D^T X       its rows are in the span of the inputs, in R^n; zero while B = 0
    dL/dB = s D^T X A^T       its rows are in the span of the A x, in R^r

and the same holds for any sum of such gradients, as sent after local steps of SGD without weight decay. So a candidate e is
tested by its distance from the row space, |z - P z| / |z| with z = e or z = A e. The test is informative if the row space is
smaller than its surrounding space: b < r inputs for B. It misses nothing if the rows span all inputs: b <= r for A; over all
layers that read the same X, up to their total number of rows, about 3 r for query, key and value.

Candidates. The first adapted layers read the same tensor before any context enters it (query, key and value of the first
block). Their inputs depend only on a token, its position and its type. Token embeddings and the norms in front of these layers
are frozen and public, so anybody can compute the input of every candidate (`FirstLayer`).

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from secure_fed.learning.models.adapters.lora import Pair, pairs

KEEP = 2.0
FILL = 0.75
MEMBER_A, MEMBER_B = 0.03, 0.005
NEAR = 0.3  # farther candidates are not even guesses
_LEAST = 1e-30  # for a change of zeros, which has no rounding
UNIT_ROUNDOFF = 2.0**-24  # of float32, the precision of parameters
ANYWHERE = -1  # the position of a token in models whose first inputs do not depend on it
_FEWEST = 3  # tokens in a vocabulary
_AT_ONCE = 1 << 24  # numbers of inputs computed at once
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


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0


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


@dataclass(frozen=True)
class FirstLayer:
    """The adapted modules that all read the model's first inputs, in the order of their names.

    positions: the number of candidate positions; 1 if inputs do not depend on the position. types: the candidate token types;
    empty if the model has none.
    """

    model: nn.Module
    pairs: tuple[Pair, ...]
    vocabulary: int
    positions: int
    placed: bool
    types: tuple[int, ...]

    def blocks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All candidates, in blocks: keys (N, 2) of position and token, and inputs (N, n) of the first layers.

        The same token with another type is another candidate with the same key.
        """
        width = self.inputs(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
        step = max(1, _AT_ONCE // (self.positions * width))
        places = torch.arange(self.positions) if self.placed else torch.tensor([ANYWHERE])
        for start in range(0, self.vocabulary, step):
            tokens = torch.arange(start, min(start + step, self.vocabulary))
            ids = tokens[:, None].expand(-1, self.positions)
            keys = torch.stack([places.expand(ids.shape), ids], -1).reshape(-1, 2)
            for kind in self.types or (None,):
                yield keys, self.inputs(ids, kind).reshape(-1, width)

    def inputs(self, ids: Tensor, kind: int | None = None) -> Tensor:
        """(texts, tokens, n) the first layers' inputs for these token ids (texts, tokens), all of one type."""
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if kind is not None:
            given["token_type_ids"] = torch.full_like(ids, kind)
        return first_reads(self.model, given, [self.pairs[0].module])[self.pairs[0].module]

    def key(self, position: int, token: int) -> tuple[int, int]:
        """The key of this token as a candidate at this position."""
        return (position if self.placed else ANYWHERE, token)


class NoFirstLayerError(Exception):
    """No adapted layer has inputs that depend only on a token and its position; the message says why."""


def first_layer(model: nn.Module, names: Sequence[str], longest: int, types: Sequence[int] = ()) -> FirstLayer:
    """The first adapted layers of `model`, among LoRA's tensors of these names, or NoFirstLayerError.

    longest: the number of candidate positions. types: token types that occur in public data.
    """
    found = pairs(names)
    if not found:
        raise NoFirstLayerError("the method puts no factors A and B beside the model's first layers")
    vocabulary = _vocabulary(model)
    low, high = min(5, vocabulary - 2), vocabulary - 1
    texts = torch.tensor([[low, high, low, low], [high, high, high, low]])
    reads = _tried(model, texts, [pair.module for pair in found])
    first = next(iter(reads.values()))
    if not torch.allclose(first[0, 1], first[1, 1], rtol=0, atol=1e-5):
        raise NoFirstLayerError(
            f"layer {next(iter(reads))}, the first with an adapter, reads what earlier layers made of the whole text"
        )
    same = tuple(
        pair
        for pair in found
        if pair.module in reads and reads[pair.module].shape == first.shape and torch.equal(reads[pair.module], first)
    )
    placed = not torch.allclose(first[0, 0], first[0, 2], rtol=0, atol=1e-6)
    return FirstLayer(model, same, vocabulary, longest if placed else 1, placed, tuple(types))


def _tried(model: nn.Module, texts: Tensor, modules: Sequence[str]) -> dict[str, Tensor]:
    """The inputs of the first of these modules, a vector per token, or NoFirstLayerError. The model may be user-defined."""
    name = type(model).__name__
    try:
        reads = first_reads(model, {"input_ids": texts, "attention_mask": torch.ones_like(texts)}, modules)
    except (TypeError, ValueError, RuntimeError, LookupError, AttributeError) as error:
        raise NoFirstLayerError(f"{name} does not run on input_ids and attention_mask alone ({error})") from error
    if not reads:
        raise NoFirstLayerError(f"{name} calls none of its layers with an adapter on a text")
    module, first = next(iter(reads.items()))
    if first.ndim != 3 or first.shape[:2] != texts.shape:
        raise NoFirstLayerError(f"layer {module}, the first with an adapter, does not read one vector a token")
    return reads


def _vocabulary(model: nn.Module) -> int:
    ask = getattr(model, "get_input_embeddings", None)
    try:
        embeddings = ask() if ask is not None else None
    except (NotImplementedError, AttributeError):  # raised by transformers' models that read no tokens
        embeddings = None
    if not isinstance(embeddings, nn.Embedding):
        raise NoFirstLayerError(f"{type(model).__name__} does not say which of its layers embeds tokens")
    if embeddings.num_embeddings < _FEWEST:
        raise NoFirstLayerError(f"a vocabulary of {embeddings.num_embeddings} tokens leaves nothing to find")
    return embeddings.num_embeddings


@torch.no_grad()
def first_reads(model: nn.Module, given: Mapping[str, Tensor], modules: Sequence[str]) -> dict[str, Tensor]:
    """The input of each of these modules in a forward pass, in the order of their calls; stops at the first module whose input
    differs from the first's.
    """
    reads: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            value = args[0] if args else next(iter(kwargs.values()))
            first = next(iter(reads.values()), value)
            if name in reads or value.shape != first.shape or not torch.equal(value, first):
                raise _EnoughError
            reads[name] = value.detach().float()
            if len(reads) == len(modules):
                raise _EnoughError

        return read

    device = next(model.parameters()).device
    with ExitStack() as afterwards, suppress(_EnoughError):
        afterwards.callback(model.train, model.training)
        for name in modules:
            put = model.get_submodule(name).register_forward_pre_hook(hook(name), with_kwargs=True)
            afterwards.enter_context(put)
        model.eval()(**{name: value.to(device) for name, value in given.items()})
    return {name: value.cpu() for name, value in reads.items()}


class _EnoughError(Exception):
    """The first layers have read; the rest of the model need not run."""
