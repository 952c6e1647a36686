"""An envelope as the content of a Flower message, and back.

A message has one record with one uint8 array: the bytes of `envelope.frames`. Flower makes a separate request for every array
at each of its six hops, so in one array a hundred adapted layers cost as much as one; Flower cuts the array into chunks of 5
MB. `Array.numpy()` is never called: `envelope.read` bounds every size by the available bytes. So no numpy format and no pickle
is ever parsed.
"""

from __future__ import annotations

import io

from flwr.app import Array, ArrayRecord, RecordDict

from secure_fed.deployment.envelope import MOST_BYTES, MOST_HEADER, Envelope, EnvelopeError, frames, read

_RECORD, _ARRAY = "envelope", "bytes"
_RAW = "secure-fed.envelope"  # Flower's serialisation type: not numpy's, so that nothing reads it as numpy's


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
