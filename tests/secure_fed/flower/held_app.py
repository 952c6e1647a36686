"""The coordinator's app, which a test holds before it sends requests or has their answers.

"1 train": before the requests of the second round; "1 answered": after the first answer to them; "end": before the farewell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from secure_fed.deployment import messages
from secure_fed.deployment.envelope import Envelope, unsealed
from secure_fed.deployment.messages import End
from secure_fed.flower import coordinator_app
from secure_fed.flower.carrier import GridCarrier
from secure_fed.rounds.transport import Request
from tests.secure_fed.flower import held


class HeldCarrier(GridCarrier):
    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[Any]:
        message = messages.decode(unsealed(next(iter(envelopes.values())))) if envelopes else None
        if isinstance(message, End):
            held.at("end")
        if isinstance(message, Request):
            held.at(f"{message.round} train")
        for found in super().exchange(envelopes, seconds):
            if found and isinstance(message, Request):
                held.at(f"{message.round} answered")
            yield found


coordinator_app.GridCarrier = HeldCarrier  # type: ignore[misc]
app = coordinator_app.app
