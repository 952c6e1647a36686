"""The whole run by Flower's simulation, a Ray actor for every core.   python simulated_flower.py FOLDER

As in its documentation: a ClientApp and a ServerApp with the strategy FedAvg, evaluated centrally. An actor keeps model and
data from its first client on. `run_simulation` is deprecated, but starts sooner than `flwr run`, which brings up a SuperLink
first.
"""

from __future__ import annotations

import os
import sys
import time

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "RAY_USAGE_STATS_ENABLED": "0"}

import numpy as np
import torch
from common import Clock, accuracy, loaded, train, trainable
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn


def numbers(model: nn.Module) -> ArrayRecord:
    return ArrayRecord({name: tensor.detach() for name, tensor in trainable(model).items()})


def put(arrays: ArrayRecord, model: nn.Module) -> None:
    model.load_state_dict(arrays.to_torch_state_dict(), strict=False)


def client_app(folder: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def local(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        work, model = loaded(folder)
        put(message.content["arrays"], model)
        client = int(context.node_config["partition-id"])
        train(model, work, client, np.random.default_rng(time.time_ns()))
        examples = MetricRecord({"num-examples": len(work.clients[client])})
        return Message(RecordDict({"arrays": numbers(model), "metrics": examples}), reply_to=message)

    return app


def server_app(folder: str, clock: Clock) -> ServerApp:
    app = ServerApp()

    @app.main()
    def serve(grid: Grid, context: Context) -> None:
        work, model = loaded(folder)

        def evaluated(number: int, arrays: ArrayRecord) -> MetricRecord | None:
            if not number:
                clock.tick()
                return None
            put(arrays, model)
            reached = accuracy(model, work.test)
            clock.tick(reached)
            return MetricRecord({"accuracy": reached})

        share, rounds = work.settings["cohort"] / len(work.clients), work.settings["rounds"]
        strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0)
        strategy.start(grid, numbers(model), rounds, evaluate_fn=evaluated)

    return app


def main(folder: str) -> None:
    clock, (work, model) = Clock(), loaded(folder)
    run_simulation(
        server_app(folder, clock),
        client_app(folder),
        num_supernodes=len(work.clients),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
    clock.report(work, sum(tensor.numel() for tensor in trainable(model).values()))


if __name__ == "__main__":
    main(sys.argv[1])
