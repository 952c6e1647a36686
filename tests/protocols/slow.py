"""A second implementation of the protocol from its description, slow and plain, without the package and without numpy.

Curve, cipher, authenticator, derivation and interpolation are written out in Python's integers. `cryptography` serves only for
single blocks of AES and for the verification of Ed25519 signatures.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

CURVE = 2**255 - 19
FIELD = 2**256 + 297


def x25519(scalar: bytes, u: bytes) -> bytes:
    """RFC 7748: the Montgomery ladder, by the formulas of its section 5."""
    bits = bytearray(scalar)
    bits[0] &= 248
    bits[31] = (bits[31] & 127) | 64
    k, x1 = int.from_bytes(bits, "little"), int.from_bytes(u, "little") % 2**255
    x2, z2, x3, z3 = 1, 0, x1, 1
    for t in reversed(range(255)):
        swap = k >> t & 1
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
        a, b, c, d = x2 + z2, x2 - z2, x3 + z3, x3 - z3
        da, cb, aa, bb = d * a, c * b, a * a, b * b
        x3, z3 = (da + cb) ** 2 % CURVE, x1 * (da - cb) ** 2 % CURVE
        x2, z2 = aa * bb % CURVE, (aa - bb) * (aa + 121665 * (aa - bb)) % CURVE
        if swap:
            x2, z2, x3, z3 = x3, z3, x2, z2
    return (x2 * pow(z2, CURVE - 2, CURVE) % CURVE).to_bytes(32, "little")


def public(secret: bytes) -> bytes:
    return x25519(secret, (9).to_bytes(32, "little"))


def framed(purpose: str, context: bytes, body: bytes = b"") -> bytes:
    parts = (b"secure-fed/1", purpose.encode(), context)
    return b"".join(struct.pack("<I", len(part)) + part for part in parts) + body


def hkdf(secret: bytes, session: bytes, purpose: str, *ids: int, publics: bytes = b"") -> bytes:
    """publics: the public keys of the two parties, in the order of their numbers in `ids`."""
    extracted = hmac.digest(session, secret, "sha256")
    return hmac.digest(extracted, framed(purpose, struct.pack(f"<{len(ids)}I", *ids)) + publics + b"\1", "sha256")


def chacha_block(key: bytes, counter: int, nonce: bytes) -> bytes:
    """RFC 8439, section 2.3."""
    start = [
        *struct.unpack("<4I", b"expand 32-byte k"),
        *struct.unpack("<8I", key),
        counter,
        *struct.unpack("<3I", nonce),
    ]
    state = list(start)
    columns = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    diagonals = [(0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]
    for _ in range(10):
        for a, b, c, d in columns + diagonals:
            for into, other, by in ((a, d, 16), (c, b, 12), (a, d, 8), (c, b, 7)):
                add = b if into == a else d
                state[into] = (state[into] + state[add]) % 2**32
                mixed = state[other] ^ state[into]
                state[other] = (mixed << by | mixed >> 32 - by) % 2**32
    return struct.pack("<16I", *((x + y) % 2**32 for x, y in zip(state, start, strict=True)))


def poly1305(key: bytes, data: bytes) -> bytes:
    """RFC 8439, section 2.5."""
    r = int.from_bytes(key[:16], "little") & 0x0FFFFFFC0FFFFFFC0FFFFFFC0FFFFFFF
    total = 0
    for at in range(0, len(data), 16):
        total = (total + int.from_bytes(data[at : at + 16] + b"\1", "little")) * r % (2**130 - 5)
    return ((total + int.from_bytes(key[16:], "little")) % 2**128).to_bytes(16, "little")


def unsealed(key: bytes, sealed: bytes, associated: bytes) -> bytes:
    """RFC 8439, section 2.8, with a nonce of zeros."""
    nonce, cipher, tag = bytes(12), sealed[:-16], sealed[-16:]
    padded = [part + bytes(-len(part) % 16) for part in (associated, cipher)]
    lengths = struct.pack("<QQ", len(associated), len(cipher))
    if poly1305(chacha_block(key, 0, nonce)[:32], b"".join(padded) + lengths) != tag:
        raise ValueError("the tag is wrong")
    stream = b"".join(chacha_block(key, 1 + block, nonce) for block in range(-(-len(cipher) // 64)))
    return bytes(x ^ y for x, y in zip(cipher, stream, strict=False))


def mask(secret: bytes, length: int, bits: int) -> list[int]:
    """AES-256 of the counters 0, 1, 2, ... (16 bytes, big-endian), read as little-endian words."""
    size, words = bits // 8, list[int]()
    for counter in range(-(-length * size // 16)):
        encryptor = Cipher(algorithms.AES(secret), modes.ECB()).encryptor()
        block = encryptor.update(counter.to_bytes(16, "big"))
        words += [int.from_bytes(block[at : at + size], "little") for at in range(0, 16, size)]
    return words[:length]


def interpolated(shares: Mapping[int, bytes]) -> bytes:
    """The value at zero of the polynomial through (holder + 1, share)."""
    total = 0
    for one, share in shares.items():
        weight = int.from_bytes(share, "little")
        for other in shares:
            if other != one:
                weight = weight * (other + 1) * pow(other - one, -1, FIELD) % FIELD
        total += weight
    return (total % FIELD).to_bytes(33, "little")


def rebuilt(shares: Mapping[int, bytes], threshold: int) -> set[bytes]:
    """The values at zero that all sets of `threshold` shares interpolate to."""
    return {interpolated({one: shares[one] for one in chosen}) for chosen in combinations(shares, threshold)}


def signed(identity: bytes, signature: bytes, purpose: str, session: bytes, body: bytes) -> bool:
    try:
        Ed25519PrivateKey.from_private_bytes(identity).public_key().verify(signature, framed(purpose, session, body))
    except InvalidSignature:
        return False
    return True


def choices(seed: bytes, clients: list[int], chooser: int, count: int) -> list[int]:
    """`count` different other clients, in the order that the keystream of `seed` draws them; biased words are skipped."""
    others, found = sorted(one for one in clients if one != chooser), list[int]()
    for word in stream_words(seed):
        one = others[word % len(others)]
        if word < 2**32 // len(others) * len(others) and one not in found:
            found.append(one)
        if len(found) == count:
            break
    return found


def stream_words(key: bytes) -> Iterator[int]:
    counter = 0
    while True:
        yield from struct.unpack("<16I", chacha_block(key, counter, bytes(12)))
        counter += 1


def session_number(cast: Mapping[str, Any], ids: list[int], identities: Mapping[int, bytes]) -> bytes:
    """The session number of the parameters that `tests.protocols.sessions.Cast` makes."""
    registry = bytes(32)
    active = int(cast.get("active", False))
    if active:
        entries = b"".join(struct.pack("<I", me) + identities[me] for me in ids)
        registry = hashlib.sha256(b"secure-fed/registry" + struct.pack("<I", len(ids)) + entries).digest()
    neighbours = cast.get("neighbours", len(ids) - 1)
    partners = int(bool(active) and neighbours < len(ids) - 1)
    numbers = (neighbours, cast["threshold"], cast.get("survivors", 2), active, partners, cast["bound"])
    encoded = b"secure-fed/session" + struct.pack("<II", 3, 4) + b"test" + struct.pack("<Q", 7) + bytes(range(32))
    encoded += struct.pack("<II", cast.get("length", 4), cast.get("bits", 32))
    encoded += struct.pack(f"<I{len(ids)}I", len(ids), *ids) + struct.pack("<5IQ", *numbers) + registry
    return hashlib.sha256(encoded).digest()


def table(body: bytes, width: int) -> tuple[dict[int, bytes], bytes]:
    """The table at the start of a message's body, and the bytes after it."""
    count, entries = struct.unpack_from("<I", body)[0], dict[int, bytes]()
    for at in range(4, 4 + count * (4 + width), 4 + width):
        entries[struct.unpack_from("<I", body, at)[0]] = body[at + 4 : at + 4 + width]
    return entries, body[4 + count * (4 + width) :]
