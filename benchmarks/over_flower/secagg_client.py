"""The ClientApp of Flower's SecAgg+: its own modifier around a client that trains. Model and torch are loaded only in the stage
that trains, because Flower starts a process for every message.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.client import ClientApp, NumPyClient
from flwr.client.mod import secaggplus_mod
from over_flower.clock import MESSAGES, note, process_began

AGENT = "secure-fed-agent"  # secure-fed's nodes are used, and they know this socket in the node's folder


class Trains(NumPyClient):
    def __init__(self, home: Path) -> None:
        self.home = home

    def fit(self, parameters: list[Any], config: dict[str, Any]) -> tuple[list[Any], int, dict[str, Any]]:
        import numpy as np
        import torch
        from common import loaded, train, trainable

        torch.set_num_threads(1)
        work, model = loaded(str(config["work"]))
        with torch.no_grad():
            for own, given in zip(trainable(model).values(), parameters, strict=True):
                own.copy_(torch.from_numpy(np.array(given)))
        client = json.loads((self.home / "client.json").read_text(encoding="utf-8"))
        train(model, work, client, np.random.default_rng())
        return [own.detach().numpy() for own in trainable(model).values()], len(work.clients[client]), {}


def timed(message: Message, context: Context, answer: Any) -> Message:
    asked, cpu = time.time(), time.process_time()
    found: Message = answer(message, context)
    times = {"began": process_began(), "asked": asked, "answered": time.time(), "cpu": cpu}
    note(Path(str(context.node_config[AGENT])).with_name(MESSAGES), node=context.node_id, **times)
    return found


app = ClientApp(
    lambda context: Trains(Path(str(context.node_config[AGENT])).parent).to_client(), mods=[timed, secaggplus_mod]
)
