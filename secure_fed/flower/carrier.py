"""Envelopes over Flower: as the content of messages, to nodes through the Grid, and their answers back as they arrive.

A message has one record with one uint8 array: the bytes of `envelope.frames`. Flower makes a separate request for every array
at each of its six hops, so in one array a hundred adapted layers cost as much as one; Flower cuts the array into chunks of 5
MB. `Array.numpy()` is never called: `envelope.read` bounds every size by the available bytes. So no numpy format and no pickle
is ever parsed.

Flower's own `send_and_receive` polls every three seconds and returns when the last answer has arrived; `GridCarrier` polls
three times a second. Every message is sent and fetched separately, so one node's message can neither enlarge the request that
carries other messages nor, if Flower cannot read it, lose them. An answer is attributed to the node that got the request,
whatever sender the answer states.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr.app import Array, ArrayRecord, Message, RecordDict

from secure_fed.deployment.envelope import MOST_BYTES, MOST_HEADER, Envelope, EnvelopeError, frames, read, refusal
from secure_fed.errors import SecureFedError

if TYPE_CHECKING:
    from flwr.serverapp import Grid  # a node, which starts a process for every message, needs none

MESSAGE_TYPE = "query.secure_fed"
PAUSE = 0.3  # seconds between two polls for answers
_RECORD, _ARRAY = "envelope", "bytes"
_RAW = "secure-fed.envelope"  # Flower's serialisation type: not numpy's, so that nothing reads it as numpy's
_SENTENCES = {  # by Flower's codes; other texts came from the node, and are not repeated
    1: "the node could not load the app: it lacks secure-fed, or has another version of it",
    2: "the node's app raised an exception, which its own log has",
    3: "the message expired, or its content was lost, before an answer was there",
    4: "the answer expired before it was fetched: look whether the node's clock is right",
    5: "the node is no longer connected to the SuperLink: it was stopped or killed, or its network is down",
    7: "the node's owner admits only apps signed by its trusted entities, and this one is not",
    8: "the node's app was killed or crashed",
}
_EXPIRED, _GONE = (3, 4), 5


class CarrierError(SecureFedError):
    """Flower's SuperLink cannot be reached."""


@dataclass(frozen=True)
class GridCarrier:
    """`deployment.links.Carrier` over Flower."""

    grid: Grid

    def nodes(self) -> set[int]:
        """The nodes connected to the SuperLink. CarrierError if it cannot be reached."""
        try:
            return set(self.grid.get_node_ids())
        except Exception as error:  # of whatever library Flower asks with
            raise CarrierError(f"the SuperLink does not say which nodes there are: {_plain(error)}") from error

    def exchange(self, envelopes: Mapping[int, Envelope], seconds: float) -> Iterator[tuple[int, Envelope] | None]:
        """Node and answer, as answers arrive, until all have arrived or the time is over; None after each look at all of them.

        Where Flower has no answer from a node, or an unreadable one, the answer is a refusal: `{"kind": "refused", ...}`. A
        message expires with the deadline, so a node that returns later gets no request for a stage that is over.
        """
        until = time.monotonic() + seconds
        waiting: dict[str, int] = {}
        for node, envelope in envelopes.items():
            if (left := until - time.monotonic()) <= 0:
                return
            message = Message(packed(envelope), node, MESSAGE_TYPE, ttl=left)
            try:
                (identifier,) = self.grid.push_messages([message])
            except Exception as error:  # of whatever library Flower asks with
                yield node, refusal("NotSent", f"the SuperLink did not take the message: {_plain(error)}")
                continue
            if identifier:
                waiting[identifier] = node
            else:
                yield node, refusal("NotSent", "the SuperLink did not take the message: it does not know the node")
        while waiting:
            for identifier, node in list(waiting.items()):
                if time.monotonic() >= until:
                    return
                if (answer := self._answer(identifier, until)) is not None:
                    del waiting[identifier]
                    yield node, answer
            if waiting:
                yield None
                time.sleep(max(0.0, min(PAUSE, until - time.monotonic())))

    def _answer(self, identifier: str, until: float) -> Envelope | None:
        """The answer to a message; None while there is none, and also when the message has expired. until: its expiry time."""
        try:
            found = next(iter(self.grid.pull_messages([identifier])), None)
            if found is None:
                return None
            if found.has_error():
                code = found.error.code
                if code in _EXPIRED and time.monotonic() >= until:
                    return None
                kind = "NotConnected" if code == _GONE else "NoAnswer"
                return refusal(kind, _SENTENCES.get(code, f"Flower reports the error {code!r:.20}"))
            return unpacked(found.content)
        except SecureFedError as error:
            return refusal(type(error).__name__, str(error))
        except Exception as error:  # a node can send messages that Flower cannot read
            return refusal("Unreadable", f"its answer cannot be read: {_plain(error)}")


def packed(envelope: Envelope) -> RecordDict:
    """The content of a message with this envelope. EnvelopeError if it is beyond an envelope's limits."""
    whole = b"".join(frames(envelope))
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: Array("uint8", (len(whole),), _RAW, whole)})})


def unpacked(content: RecordDict) -> Envelope:
    """The envelope in a message. EnvelopeError for anything else."""
    record = content.get(_RECORD)
    array = record.get(_ARRAY) if isinstance(record, ArrayRecord) else None
    if array is None or array.stype != _RAW or len(content) != 1 or len(content.array_records[_RECORD]) != 1:
        raise EnvelopeError("a message is not one of secure-fed's: it has other records than that of an envelope")
    if len(array.data) > 2 * MOST_HEADER + MOST_BYTES:
        raise EnvelopeError(f"a message has {len(array.data):,} bytes, more than any envelope")
    stream = io.BytesIO(array.data)
    found = read(stream, len(array.data))
    if stream.tell() != len(array.data):
        raise EnvelopeError("a message goes on after its envelope")
    return found


def _plain(error: Exception) -> str:
    """An exception of a library in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text:.200}" if text else type(error).__name__
