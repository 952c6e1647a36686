"""The coordinator's app, which a test holds before it sends a stage's messages: "1 unmask" (of the second round), "end"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from secure_fed.deployment import messages
from secure_fed.deployment.envelope import Envelope, unsealed
from secure_fed.flower import coordinator_app
from secure_fed.flower.carrier import GridCarrier
from secure_fed.rounds.transport import Stage
from tests.secure_fed.flower import held


class HeldCarrier(GridCarrier):
    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[Any]:
        for envelope in [*envelopes.values()][:1]:
            kind = messages.kind(envelope)
            message = messages.decode(unsealed(envelope)) if kind == "stage" else None
            held.at(f"{message.round} {message.name}" if isinstance(message, Stage) else kind)
        yield from super().exchange(envelopes, seconds)


coordinator_app.GridCarrier = HeldCarrier  # type: ignore[misc]
app = coordinator_app.app
