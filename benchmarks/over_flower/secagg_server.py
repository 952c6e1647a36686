"""The ServerApp of Flower's SecAgg+: its workflow and its FedAvg with the same model and test set, recording stage times."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import accuracy, loaded, trainable
from flwr.app import Context
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import Grid, ServerApp
from over_flower.clock import STAGES, note

app = ServerApp()
OURS = {"setup": "advertise", "share_keys": "share", "collect_masked_vectors": "mask", "unmask": "unmask"}


def timed(stage: Callable[..., bool], name: str, file: Path, round_: list[int]) -> Callable[..., bool]:
    def run(*given: Any) -> bool:
        began = time.time()
        went = stage(*given)
        note(file, name=name, round=round_[0], began=began, ended=time.time(), answers={})
        if not went:
            raise RuntimeError(f"Flower's secure aggregation halted at {name}")
        return went

    return run


@app.main()
def main(grid: Grid, context: Context) -> None:
    place = Path(str(context.run_config["work"]))
    work, model = loaded(str(place))
    nodes, round_ = len(work.clients), [-1]

    def evaluated(number: int, arrays: list[Any], config: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        with torch.no_grad():
            for own, given in zip(trainable(model).values(), arrays, strict=True):
                own.copy_(torch.from_numpy(np.array(given, dtype=np.float32)))
        round_[0] = number
        reached = accuracy(model, work.test)
        if number:
            note(place / "rounds.jsonl", round=number - 1, ended=time.time(), accuracy=reached)
        return 0.0, {"accuracy": reached}

    strategy = FedAvg(
        fraction_fit=1.0,
        fraction_evaluate=0.0,
        min_fit_clients=nodes,
        min_available_clients=nodes,
        evaluate_fn=evaluated,
        on_fit_config_fn=lambda number: {"work": str(place)},
        initial_parameters=ndarrays_to_parameters([own.detach().numpy() for own in trainable(model).values()]),
    )
    secagg = SecAggPlusWorkflow(1.0, 0.6)
    for flower, name in OURS.items():
        setattr(secagg, f"{flower}_stage", timed(getattr(secagg, f"{flower}_stage"), name, place / STAGES, round_))
    legacy = LegacyContext(context, ServerConfig(num_rounds=work.settings["rounds"]), strategy=strategy)
    DefaultWorkflow(fit_workflow=secagg)(grid, legacy)
