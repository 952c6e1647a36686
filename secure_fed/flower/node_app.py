"""The ClientApp: a relay. Bytes of a message go to the node's agent, and its answer back.

Flower starts a process for every message. This one imports no torch, reads no data and no key, and decides nothing: the agent
(`secure_fed.deployment.agent`), which lives on between messages, does that. Errors here and in `relay` are printed for the
node's owner, and leave the node as a sentence without the node's paths or names.
"""

from __future__ import annotations

from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from secure_fed.deployment import relay
from secure_fed.deployment.envelope import EnvelopeError, refusal
from secure_fed.errors import UsageError
from secure_fed.flower.carrier import packed, unpacked

AGENT = "secure-fed-agent"  # the path of the agent's socket, in the SuperNode's --node-config: set only by the owner
app = ClientApp()


@app.query("secure_fed")
def answer(message: Message, context: Context) -> Message:
    """The agent's answer; a refusal if there is no agent, or the message is no request for it."""
    agent = context.node_config.get(AGENT)
    try:
        if not isinstance(agent, str) or not agent:
            raise UsageError(f"the SuperNode was started without {AGENT} in its --node-config")
        content = packed(relay.ask(Path(agent), unpacked(message.content), message.metadata.ttl))
    except EnvelopeError as error:  # about the message or the answer: `relay` reports errors of the connection itself
        content = packed(refusal(type(error).__name__, str(error)))
    except Exception as error:  # any error may name the owner's folders
        content = packed(relay.unreachable(type(error).__name__, error))
    return Message(content, reply_to=message)
