"""secure-fed's ClientApp, recording for each message when its process started, and the agent's request and answer."""

from __future__ import annotations

import time
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from over_flower.clock import MESSAGES, note, process_began

from secure_fed.flower import node_app

app = ClientApp()


@app.query("secure_fed")
def answer(message: Message, context: Context) -> Message:
    asked, cpu = time.time(), time.process_time()
    found = node_app.answer(message, context)
    times = {"began": process_began(), "asked": asked, "answered": time.time(), "cpu": cpu}
    note(Path(str(context.node_config[node_app.AGENT])).with_name(MESSAGES), node=context.node_id, **times)
    return found
