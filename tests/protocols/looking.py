"""All bytes reachable from an object, to search them for secrets."""

from __future__ import annotations

import gc
import struct
import traceback
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

_CODE = (type, ModuleType, FunctionType, BuiltinFunctionType)  # code, not the data of an object
_SEPARATOR = bytes.fromhex("a5" * 7)


def everything(root: object) -> Iterator[object]:
    """The object and every object reachable from it through attributes, slots, containers, views and closures."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or (isinstance(thing, _CODE) and not _closes_over(thing)):
            continue
        seen.add(id(thing))
        yield thing
        waiting.extend(_inside(thing))


def _closes_over(thing: object) -> bool:
    return isinstance(thing, FunctionType) and thing.__closure__ is not None


def _inside(thing: object) -> list[object]:
    if isinstance(thing, FunctionType):  # not its globals, which belong to a module
        return [cell.cell_contents for cell in thing.__closure__ or ()]
    if isinstance(thing, np.ndarray):  # the garbage collector does not know the base of an array
        return [thing.base, *(thing.ravel().tolist() if thing.dtype.hasobject else ())]
    if isinstance(thing, memoryview):
        return [thing.obj]
    return gc.get_referents(thing)


def contents(root: object) -> bytes:
    """All bytes, strings, arrays, numbers and private keys reachable from an object, joined by a separator.

    Integers in a container are packed together as words of 4 and of 8 bytes; large integers appear as 33 bytes, in both byte
    orders.
    """
    parts: list[bytes] = []
    for thing in everything(root):
        parts.extend(_bytes(thing))
    return _SEPARATOR.join(parts)


def remains(error: BaseException | None) -> list[dict[str, object]]:
    """The local variables of frames of `protocols` that an error and its causes keep alive."""
    found = []
    while error is not None:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").startswith("protocols."):
                found.append(dict(frame.f_locals))
        error = error.__cause__ or error.__context__
    return found


def _bytes(thing: object) -> Iterator[bytes]:
    if isinstance(thing, bytes | bytearray):
        yield bytes(thing)
    elif isinstance(thing, str):
        yield thing.encode(errors="replace")
        if len(thing) % 2 == 0 and set(thing) <= set("0123456789abcdef"):
            yield bytes.fromhex(thing)
    elif isinstance(thing, np.ndarray | memoryview):
        yield thing.tobytes()
    elif isinstance(thing, X25519PrivateKey | Ed25519PrivateKey):
        yield thing.private_bytes_raw()
    elif isinstance(thing, int):
        yield from _number(abs(thing))
    elif isinstance(thing, dict):
        yield from _row(list(thing.values()))
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from _row(list(thing))


def _number(value: int) -> Iterator[bytes]:
    if 2**64 <= value < 2**264:
        yield value.to_bytes(33, "little")
        yield value.to_bytes(33, "big")


def _row(values: list[object]) -> Iterator[bytes]:
    numbers = [int(value) for value in values if isinstance(value, int | np.integer)]
    if numbers and len(numbers) == len(values):
        for bits, code in ((32, "I"), (64, "Q")):
            yield struct.pack(f"<{len(numbers)}{code}", *(number % 2**bits for number in numbers))
