"""The length of a safetensors file, from names, shapes and types alone: no weights are needed."""

from __future__ import annotations

import json
import math
from functools import lru_cache

import torch

# The names of types in safetensors, in the order in which it puts them into a file.
_TYPES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PLACES = {dtype: place for place, dtype in enumerate(_TYPES)}


@lru_cache(maxsize=256)
def wire_size(parts: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]) -> int:
    """The size in bytes of the safetensors file that the library writes for tensors of these (name, shape, type).

    The file is eight bytes, a JSON header padded to a multiple of eight, and the numbers. The header gives each tensor's type,
    shape and offsets; tensors are ordered by type and then by name.
    """
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, shape, dtype in sorted(parts, key=lambda part: (_PLACES[part[2]], part[0])):
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _TYPES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    return 8 + -(-len(text) // 8) * 8 + end
