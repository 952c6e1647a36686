"""Recording wrappers: replies as they pass a transport, and masked sums as they are decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secure_fed.rounds.summing import Intake, Summing
from secure_fed.rounds.transport import Request, Transport
from secure_fed.tensors.tensors import Layout, Tensors


@dataclass(frozen=True)
class RecordedTransport:
    """A transport that passes each request and its reply to `record` before handing the reply on."""

    inner: Transport
    record: Callable[[Any, Any], None]

    def exchange(self, requests: Mapping[int, Any]) -> Iterator[Any]:
        for reply in self.inner.exchange(requests):
            self.record(requests[reply.client], reply)
            yield reply


@dataclass(frozen=True)
class RecordedSum:
    """A `Summing` that passes each request and the sum of its contributions to `record`."""

    inner: Summing
    record: Callable[[Request, Intake], None]

    def gather(self, cohort: Sequence[int], request: Request, layout: Layout, transport: Transport) -> Intake:
        intake = self.inner.gather(cohort, request, layout, transport)
        self.record(request, intake)
        return intake

    def require_plausible(self, noised: Tensors, clip_norm: float, std: float) -> None:
        self.inner.require_plausible(noised, clip_norm, std)

    def traffic(
        self, layout: Layout, request: Request, cohort: float, wire_size: Callable[[], int]
    ) -> tuple[float, float]:
        return self.inner.traffic(layout, request, cohort, wire_size)
