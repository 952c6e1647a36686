"""secure-fed's ServerApp, recording when each stage was sent and ended, and when each node's answer arrived."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from over_flower.clock import STAGES, note

from secure_fed.deployment.coordinator import conduct
from secure_fed.deployment.envelope import Envelope, unsealed
from secure_fed.flower.carrier import GridCarrier
from secure_fed.flower.coordinator_app import of_run_config

app = ServerApp()


@dataclass(frozen=True)
class Timed(GridCarrier):
    file: Path

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope]]:
        header = json.loads(unsealed(next(iter(envelopes.values()))).header)
        began, ends = time.time(), {}
        for node, answer in super().exchange(envelopes, seconds):
            ends[node] = time.time()
            yield node, answer
        name = header.get("name", header["kind"])
        note(self.file, name=name, round=header.get("round"), began=began, ended=time.time(), answers=ends)


@app.main()
def main(grid: Grid, context: Context) -> None:
    folder, settings = of_run_config(context.run_config)
    conduct(folder, Timed(grid, folder / STAGES), settings, partial(print, flush=True))
