"""Writing and reading the content of envelopes: typed header fields and arrays, each taken once.

For invalid content readers raise ValueError, KeyError, TypeError, OverflowError or RuntimeError, and `messages` turns these
into one error.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from secure_fed.deployment.envelope import Envelope
from secure_fed.errors import SecureFedError
from secure_fed.tensors.tensors import Tensors


class MessageError(SecureFedError):
    """An envelope that is no message of this version."""


class Fields(dict[str, Any]):
    """The fields of a header, each taken once, with a check of its type."""

    def take(self, name: str, *types: type) -> Any:
        value = self.pop(name)
        if type(value) not in types:
            raise ValueError(f"{name} is {value!r:.40}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        found = self.take(name, list)
        if not all(type(one) is str for one in found):
            raise ValueError(f"{name} is no list of texts")
        return tuple(found)

    def number(self, name: str) -> int:
        found: int = self.take(name, int)
        if not 0 <= found < 2**64:
            raise ValueError(f"{name} is {found:.40g}")
        return found

    def content(self, name: str, size: int) -> bytes:
        """Bytes of this size, from base 64."""
        found = base64.b64decode(self.take(name, str), validate=True)
        if len(found) != size:
            raise ValueError(f"{name} has {len(found)} bytes, and not {size}")
        return found

    def real(self, name: str) -> float:
        return float.fromhex(self.take(name, str))

    def done(self) -> None:
        """Require that no field is left over."""
        if self:
            raise ValueError(f"it has a field {next(iter(self))!r:.40} that its kind has not")


class Arrays(dict[str, Any]):
    """The arrays of an envelope, each taken once."""

    def content(self, name: str) -> bytes:
        array = self.pop(name)
        if array.dtype != np.uint8 or array.ndim != 1:
            raise ValueError(f"{name} is no array of bytes")
        return bytes(array.tobytes())

    def tensors(self, owner: str, bits: frozenset[str]) -> Tensors:
        """The tensors of one owner. bits: names of arrays that contain the bits of a bfloat16 tensor."""
        prefix = f"{owner}/"
        names = [name for name in self if name.startswith(prefix)]
        parts = {}
        for name in names:
            array = self.pop(name)
            tensor = torch.from_numpy(np.array(array))  # a copy that is writable and contiguous
            if name in bits:
                if tensor.dtype != torch.int16:
                    raise ValueError(f"{name} is not the bits of a bfloat16")
                tensor = tensor.view(torch.bfloat16)
            parts[name.removeprefix(prefix)] = tensor
        return Tensors.from_parts(parts)

    def done(self) -> None:
        if self:
            raise ValueError(f"it has an array {next(iter(self))!r:.40} that its kind has not")


def made(kind: str, fields: Mapping[str, Any], **content: bytes | bytearray) -> Envelope:
    """An envelope of this kind. content: arrays of bytes."""
    header = json.dumps({"kind": kind, **fields}, separators=(",", ":"), allow_nan=False).encode()
    return Envelope(header, {name: np.frombuffer(bytes(one), np.uint8) for name, one in content.items()})


def made_with(
    kind: str, fields: Mapping[str, Any], owned: Mapping[str, Tensors], content: Mapping[str, bytes] | None = None
) -> Envelope:
    """An envelope of this kind with tensors, by their owners' names. content: other arrays, of bytes."""
    arrays, bits = dict[str, Any](), list[str]()
    for owner, tensors in owned.items():
        for name, part in tensors.parts().items():
            part = part.detach().cpu().contiguous()
            if part.dtype == torch.bfloat16:
                bits.append(f"{owner}/{name}")
                part = part.view(torch.int16)
            arrays[f"{owner}/{name}"] = part.numpy()
    bare = made(kind, {**fields, "bfloat16": bits}, **(content or {}))
    return Envelope(bare.header, {**bare.arrays, **arrays})


def fields_of(envelope: Envelope) -> Fields:
    """The fields of an envelope's header, its kind among them. MessageError unless it is one object with each field once."""
    try:
        found = json.loads(envelope.header.decode(), object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the header of an envelope is no JSON: {error!s:.100}") from error
    if not isinstance(found, dict) or "kind" not in found:
        raise MessageError("the header of an envelope is no object with a kind")
    return Fields(found)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a field is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def base64_of(content: bytes) -> str:
    """The base 64 text that `Fields.content` reads."""
    return base64.b64encode(content).decode()


def hex_of(number: float) -> str:
    """The text that `Fields.real` reads back as the same number, including infinities and NaN."""
    return float(number).hex()
