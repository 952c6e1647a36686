"""Replies as they pass on a transport, and sums as they are decoded behind masks, told to whoever listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from secure_fed.rounds.masked.masked_sum import Gathered
from secure_fed.rounds.transport import Request, Transport
from secure_fed.tensors.tensors import Layout

if TYPE_CHECKING:
    from secure_fed.rounds.masked.masked_sum import MaskedSums


@dataclass(frozen=True)
class Overheard:
    """A transport whose replies are told to `hear(request, reply)` as they pass."""

    inner: Transport
    hear: Callable[[Any, Any], None]

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        for reply in self.inner.exchange(requests):
            self.hear(requests[reply.client], reply)
            yield reply


@dataclass(frozen=True)
class Decoded:
    """Masked sums that are told to `hear(request, gathered)` when they are decoded."""

    inner: MaskedSums
    hear: Callable[[Request, Gathered], None]

    def gather(self, asked: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Gathered:
        found = self.inner.gather(asked, request, layout, transport)
        self.hear(request, found)
        return found

    def expected_traffic(self, layout: Layout, request: Request, cohort: float) -> tuple[float, float]:
        return self.inner.expected_traffic(layout, request, cohort)
