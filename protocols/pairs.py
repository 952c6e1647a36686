"""What a pair of clients has in common and nobody else: a channel each way, and one mask.

The mask of i and j is PRG(s_ij), with s_ij derived from their mask keys. The smaller id adds it and the larger one takes it
away, so in a sum over both it is gone. Whoever has the mask key of either can compute it.
"""

from __future__ import annotations

from protocols.keys import AgreementKey, Secret, derive

Mask = tuple[Secret, int]  # what keys the stream, and the sign with which it is added


def pair_mask(key: AgreementKey, public: bytes, session: bytes, me: int, other: int) -> Mask:
    """What `me` adds on account of `other`, from the mask key of the one and the public mask key of the other.

    It is also what takes off what `other` added on account of `me`.
    """
    secret = derive(key.agree(public), session, "mask", min(me, other), max(me, other))
    return secret, 1 if other > me else -1


def channels(key: AgreementKey, public: bytes, session: bytes, me: int, other: int) -> tuple[Secret, Secret]:
    """The keys of what `me` sends to `other` and of what comes back. Each seals one message of a session."""
    agreed = key.agree(public)
    return derive(agreed, session, "share", me, other), derive(agreed, session, "share", other, me)
