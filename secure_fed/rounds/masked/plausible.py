"""Refuses sums that no honest clients can have made: a bound on the damage of a lying client to a masked sum.

Masks keep single contributions from the server, so it cannot bound one: in a sum of n, a client can send up to n times the
allowed contribution, or a weight that cancels all other weights. The server can check the sum. Over n honest contributors every
coordinate is within n times the bound, the weights add up to between 0 and n times the largest, the mean loss is within its
bound, and the number of contributions is at most n. With shares of noise only the length of the noised sum is checked. A sum
beyond these limits is refused before it is used. Nobody can identify the client that spoiled it.

Where the server adds the noise of a guarantee, it checks the noised sum, by the number of all possible contributors. A check
without noise would reveal to a lying client on which side of a limit the other clients' sum is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from protocols.errors import Tampering
from secure_fed.rounds.masked.encoding import LOSS, Contribution, Encoding, Noised, Rounded
from secure_fed.tensors.tensors import Tensors


def require_plausible(decoded: Contribution, encoding: Encoding, contributors: int) -> None:
    """Tampering if the decoded sum cannot come from `contributors` honest contributors."""
    for what in _implausible(decoded, encoding, contributors):
        raise _spoiled(what, contributors)


def require_plausible_release(released: Tensors, clip_norm: float, std: float, contributors: int) -> None:
    """Tampering if a sum with noise of standard deviation `std` cannot come from `contributors` honest contributors.

    The length of honest noise is beyond this limit with a probability of at most exp(-40).
    """
    size = sum(part.numel() for part in released.parts().values())
    norm = released.norm()
    if not norm <= contributors * clip_norm + std * (math.sqrt(size) + _FARTHEST):
        raise _spoiled(f"the noised sum is {norm:.6g} long", contributors)


def _spoiled(what: str, contributors: int) -> Tampering:
    return Tampering(
        f"{what}, which {contributors} honest contributors cannot make: a client lied about its input, and nobody can tell "
        "which one",
        stage="unmask",
        protected="nothing was released of this sum",
    )


def _implausible(decoded: Contribution, encoding: Encoding, contributors: int) -> Iterator[str]:
    if isinstance(encoding, Rounded):
        yield from _of_words(decoded, encoding, contributors)
    if isinstance(encoding, Noised):
        yield from _of_noised(decoded, encoding, contributors)


def _of_words(decoded: Contribution, encoding: Rounded, contributors: int) -> Iterator[str]:
    off = contributors * encoding.codec.error  # rounding, at most
    values = decoded.values / encoding.most
    largest, weight = float(np.abs(values).max(initial=0.0)), decoded.weight / encoding.most
    if largest > contributors * encoding.plan.bound + off:
        yield f"a coordinate of the sum is {largest:.6g}"
    slack = off / encoding.plan.bound
    if not -slack <= weight <= contributors + slack:
        yield f"the contributors' weights add up to {decoded.weight:.6g}"
    if abs(decoded.loss) > LOSS * (1 + 4 * encoding.codec.error / encoding.plan.bound):  # false for NaN
        yield f"the mean loss is {decoded.loss:.6g}"
    if encoding.most == 1 and abs(weight - round(weight)) > slack:
        yield f"weights of 0 or 1 add up to {decoded.weight:.6g}"
    if decoded.contributed is None:
        return
    if not weight - slack <= decoded.contributed <= contributors or (
        encoding.most == 1 and round(weight) != decoded.contributed
    ):
        yield f"{decoded.contributed} contributions are counted, with weights of {decoded.weight:.6g}"


def _of_noised(decoded: Contribution, encoding: Noised, contributors: int) -> Iterator[str]:
    """The noise of n shares is subgaussian, so its length is beyond sqrt(d) + sqrt(2 t) deviations with probability exp(-t) at
    most (Hsu, Kakade and Zhang, 2012): t = 40."""
    norm, grid = float(np.linalg.norm(decoded.values)), encoding.mechanism.grid(encoding.plan.size)
    noise = encoding.mechanism.std(encoding.plan.clip_norm, encoding.plan.size, contributors)
    longest = contributors * grid.bound / grid.unit * encoding.plan.clip_norm + noise * (
        math.sqrt(encoding.plan.size) + _FARTHEST
    )
    if norm > longest:
        yield f"the noised sum is {norm:.6g} long"


_FARTHEST = math.sqrt(80)
