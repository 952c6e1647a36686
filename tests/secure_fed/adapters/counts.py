"""The number of parameters of each adapter, by formula."""

from __future__ import annotations

import math
from collections.abc import Iterable

from secure_fed.learning.models.adapters.hypernetwork import Hypernetworks
from secure_fed.learning.models.adapters.inserted import Bottlenecks, Compacters, Mixtures
from secure_fed.learning.models.adapters.tensor_train import TensorTrains, core_shapes, factorisation
from secure_fed.learning.models.adapters.virtual_tokens import EncodedPromptTokens, Keys, Prefix, PromptTokens


def bottlenecks(adapter: Bottlenecks, widths: Iterable[int]) -> int:
    """2 r d + r + d at a place of width d."""
    return sum(2 * adapter.bottleneck * width + adapter.bottleneck + width for width in widths)


def mixtures(adapter: Mixtures, widths: Iterable[int]) -> int:
    """M (r d + r) in the experts' lower layers and r d + d in the upper layer, at a place of width d."""
    r = adapter.bottleneck
    return sum(adapter.experts * (r * width + r) + r * width + width for width in widths)


def compacters(adapter: Compacters, widths: Iterable[int]) -> int:
    """3 (r + d) at a place of width d, and n^3 in the shared rule."""
    return adapter.n**3 + sum(3 * (adapter.bottleneck + width) for width in widths)


def hypernetwork(adapter: Hypernetworks, width: int, layers: int, classes: int) -> int:
    """s (d + r t) in the factors; t (C + d + 2), and t for each layer, in the embeddings. The class shares do not train."""
    t, s = adapter.context_dim, adapter.hyper_dim
    return s * (width + adapter.bottleneck * t) + t * (classes + width + 2) + layers * t


def prefix(adapter: Prefix, keys: Keys) -> int:
    """2 p L H for L layers; with projection p H + (H^2 + H) + (H + 1) 2 L H."""
    row = 2 * keys.layers * keys.width
    if not adapter.projected:
        return adapter.length * row
    return adapter.length * keys.width + keys.width * (keys.width + 1) + (keys.width + 1) * row


def prompt(adapter: PromptTokens | EncodedPromptTokens, hidden: int) -> int:
    """p H; with an MLP 3 (H^2 + H) more; with an LSTM two bidirectional layers and two linear layers more."""
    if isinstance(adapter, PromptTokens):
        return adapter.length * hidden
    if adapter.network == "MLP":
        return adapter.length * hidden + 3 * (hidden * hidden + hidden)
    gates = 2 * 4 * hidden * ((hidden + hidden) + (2 * hidden + hidden) + 4)
    return adapter.length * hidden + gates + (4 * hidden * hidden + 2 * hidden) + (2 * hidden * hidden + hidden)


def tensor_trains(adapter: TensorTrains, widths: Iterable[int], dense: Iterable[tuple[int, int]] = ()) -> int:
    """r k_1 + r^2 (k_2 + .. + k_(J-1)) + r k_J for each train over k_1 .. k_J, and the adapters' biases."""

    def cores(m: int, n: int) -> int:
        return sum(math.prod(shape) for shape in core_shapes(factorisation(m, n).shape, adapter.rank))

    count = sum(cores(m, n) for m, n in dense)
    for width in widths:
        count += cores(width, adapter.bottleneck) + cores(adapter.bottleneck, width)
        count += (adapter.bottleneck + width) * adapter.biases
    return count
