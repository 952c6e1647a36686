"""A ServerApp for tests: a dishonest coordinator and a network attacker that follow the script named in the run-config."""

from __future__ import annotations

from functools import partial

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from secure_fed.deployment import coordinator
from secure_fed.flower.carrier import GridCarrier
from secure_fed.flower.coordinator_app import of_run_config
from tests.secure_fed.deployment.hostile import SCRIPTS, Lying, OnTheWay

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    given = dict(context.run_config)
    script = SCRIPTS[str(given.pop("script"))]
    folder, settings = of_run_config(given)
    coordinator.Links = partial(Lying, script=script)  # type: ignore[misc,assignment]
    coordinator.conduct(folder, OnTheWay(GridCarrier(grid), script), settings, partial(print, flush=True))
