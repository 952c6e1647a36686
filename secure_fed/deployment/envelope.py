"""An envelope: the uninterpreted content of one message between the coordinator and a node, and its signature.

Its bytes, on the socket between a node's relay and its agent, little-endian:

    header u32 | header | arrays u32 | for each: name u16 | name | dtype u8 | dimensions u8 | each u64 | numbers

Every size is compared with its limit before anything of that size is read or allocated. Needs no torch.

Signatures are independent of the transport. The coordinator signs every request with the key that the charter names, and a node
signs every answer with its identity, together with the digest of the request. So a carrier of messages (a proxy, the owner of
the relaying server) can drop and delay messages, but can neither make nor change one, nor pass off the answer to one request as
the answer to another. Signatures hide nothing; masks and TLS do.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from protocols.keys import Identity, verify
from secure_fed.errors import SecureFedError

MOST_HEADER = 16_000_000  # bytes
MOST_ARRAYS = 10_000
MOST_BYTES = 8 * 2**30  # of all arrays together
_NAME, _DIMENSIONS = 1000, 8  # bytes of an array's name, and dimensions of an array
DTYPES = tuple(map(np.dtype, ("<f4", "<f8", "<f2", "|u1", "<u4", "<u8", "<i2", "<i4", "<i8", "|i1", "|b1", "<u2")))
SIGNATURE = "signature"  # the name of its array
REQUEST, ANSWER = "coordinator request", "node answer"  # the purposes of signatures


class EnvelopeError(SecureFedError):
    """Bytes that are no envelope, or an envelope beyond the limits."""


class Forged(SecureFedError):  # noqa: N818 - a finding, not a failure
    """An envelope without the signature of its supposed sender."""


@dataclass(frozen=True)
class Envelope:
    """A header, which is one JSON object with a "kind", and named arrays."""

    header: bytes
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)


def refusal(error: str, sentence: str) -> Envelope:
    """The envelope of a refusal by a carrier of envelopes."""
    return Envelope(json.dumps({"kind": "refused", "error": error, "sentence": sentence}).encode())


def sealed(envelope: Envelope, identity: Identity, purpose: str, charter: bytes, answers: bytes = b"") -> Envelope:
    """The envelope with a signature. charter: its digest. answers: digest of the request that this answers."""
    signature = identity.sign(purpose, charter, answers + digest(envelope))
    return Envelope(envelope.header, {**envelope.arrays, SIGNATURE: np.frombuffer(signature, np.uint8)})


def opened(envelope: Envelope, public: bytes, purpose: str, charter: bytes, answers: bytes = b"") -> Envelope:
    """The envelope without its signature. Forged unless the holder of the key signed it, for this purpose and charter."""
    array = envelope.arrays.get(SIGNATURE)
    signature = b"" if array is None else array.tobytes()
    if len(signature) != 64 or not verify(public, signature, purpose, charter, answers + digest(envelope)):
        raise Forged(
            "an envelope is not signed by the party that it should be from: somebody on the way made or changed it"
        )
    return unsealed(envelope)


def unsealed(envelope: Envelope) -> Envelope:
    """The envelope without its signature, which is not checked."""
    return Envelope(envelope.header, {name: array for name, array in envelope.arrays.items() if name != SIGNATURE})


def digest(envelope: Envelope) -> bytes:
    """(32,) SHA-256 over the header and every array: its name, dtype, shape and bytes; without the signature."""
    found = hashlib.sha256(struct.pack("<Q", len(envelope.header)) + envelope.header)
    for name in sorted(envelope.arrays):
        if name == SIGNATURE:
            continue
        array = np.ascontiguousarray(envelope.arrays[name])
        for part in (name.encode(), array.dtype.str.encode(), struct.pack(f"<{array.ndim}Q", *array.shape)):
            found.update(struct.pack("<Q", len(part)) + part)
        found.update(array.reshape(-1).view(np.uint8).data)
    return found.digest()


def require_bounded(envelope: Envelope, most: int = MOST_BYTES) -> None:
    """EnvelopeError for an envelope beyond the limits, or with arrays of another type than `DTYPES`."""
    _within("a header", len(envelope.header), MOST_HEADER)
    _within("the number of arrays", len(envelope.arrays), MOST_ARRAYS)
    _within("all arrays", sum(array.nbytes for array in envelope.arrays.values()), most)
    for name, array in envelope.arrays.items():
        _within("the name of an array", len(name.encode()), _NAME)
        _within("the dimensions of an array", array.ndim, _DIMENSIONS)
        if array.dtype not in DTYPES:
            raise EnvelopeError(f"array {name!r:.40} is of type {array.dtype}, which does not travel")


def frames(envelope: Envelope) -> Iterator[bytes | memoryview]:
    """The bytes of an envelope, in parts; numbers are not copied."""
    require_bounded(envelope)
    yield struct.pack("<I", len(envelope.header)) + envelope.header + struct.pack("<I", len(envelope.arrays))
    for name, given in envelope.arrays.items():
        array, text = np.asarray(given, order="C"), name.encode()
        shape = struct.pack(f"<BB{array.ndim}Q", DTYPES.index(array.dtype), array.ndim, *array.shape)
        yield struct.pack("<H", len(text)) + text + shape
        yield array.reshape(-1).view(np.uint8).data


def read(stream: BinaryIO, most: int = MOST_BYTES) -> Envelope:
    """The next envelope of a stream. EnvelopeError for anything else."""
    header = _exactly(stream, _within("a header", _number(stream, "<I"), MOST_HEADER))
    count = _within("the number of arrays", _number(stream, "<I"), MOST_ARRAYS)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    left = most
    for _ in range(count):
        name, array = _array(stream, left)
        if name in arrays:
            raise EnvelopeError(f"array {name!r:.40} is there twice")
        arrays[name] = array
        left -= array.nbytes
    return Envelope(header, arrays)


def _array(stream: BinaryIO, most: int) -> tuple[str, np.ndarray[Any, Any]]:
    try:
        name = _exactly(stream, _within("the name of an array", _number(stream, "<H"), _NAME)).decode()
    except UnicodeDecodeError as error:
        raise EnvelopeError("the name of an array is no UTF-8") from error
    kind, dimensions = struct.unpack("<BB", _exactly(stream, 2))
    if kind >= len(DTYPES):
        raise EnvelopeError(f"array {name!r:.40} is of an unknown type")
    _within("the dimensions of an array", dimensions, _DIMENSIONS)
    shape = struct.unpack(f"<{dimensions}Q", _exactly(stream, 8 * dimensions))
    _within("all arrays", math.prod(shape) * DTYPES[kind].itemsize, most)
    try:
        array = np.empty(shape, DTYPES[kind])
    except (ValueError, MemoryError) as error:  # a length beyond numpy's, or too much memory
        raise EnvelopeError(f"array {name!r:.40} has a shape that no array here can have") from error
    numbers = array.reshape(-1).view(np.uint8)
    _into(stream, numbers.data)
    if array.dtype == np.bool_ and array.size and numbers.max() > 1:  # numpy would accept any byte
        raise EnvelopeError(f"array {name!r:.40} holds truth values other than 0 and 1")
    return name, array


def _within(what: str, found: int, most: int) -> int:
    if found > most:
        raise EnvelopeError(f"an envelope is too large: {what}: {found:,}, above {most:,}")
    return found


def _number(stream: BinaryIO, form: str) -> int:
    return int(struct.unpack(form, _exactly(stream, struct.calcsize(form)))[0])


def _exactly(stream: BinaryIO, count: int) -> bytes:
    content = bytearray(count)
    _into(stream, memoryview(content))
    return bytes(content)


def _into(stream: BinaryIO, place: memoryview) -> None:
    while place:
        count = stream.readinto(place)  # type: ignore[attr-defined]
        if not count:
            raise EnvelopeError("an envelope is shorter than its header states")
        place = place[count:]
