"""The trusted parties, in words: for a guarantee, and for masks without a guarantee.

The protection by masks depends on two assumptions, which every sentence here names: whether the server follows the protocol,
and how many clients collude with it.
"""

from __future__ import annotations

import math

from secure_fed.config import SecureAggregationConfig
from secure_fed.rounds.masked.wiring import Masks
from secure_fed.rounds.protection import Protection


def trusted(protection: Protection, masks: Masks | None) -> str:
    """The parties that could break the guarantee of a private run."""
    if protection.placement.local:
        return _OWN_MACHINE if masks is None else f"{_OWN_MACHINE}, with masks or without"
    if masks is None:
        return f"{_PLAIN}, and keeps the noise{_coins(protection)} secret"
    return _of_sums(protection, masks) if protection.placement.server_noise else _of_shares(protection, masks)


def only_masks(settings: SecureAggregationConfig, *, coins: bool) -> str:
    """The protection of clients in a run with masks and without privacy. coins: whether coins draw its cohorts."""
    server = _KEEPS if not settings.active else "the server, even one that lies about keys or about who takes part,"
    lies = "" if settings.active else " A server that lies may read single clients."
    whose = _drawn(settings) if coins else "a round's clients"
    return (
        f"No differential privacy: secure aggregation keeps every client's contribution from {server} {_colluding(settings)}. "
        f"It learns sums over {whose}.{lies} Nothing bounds what these sums and the model reveal of the "
        "training data."
    )


def _of_sums(protection: Protection, masks: Masks) -> str:
    """With noise that the server adds to sums."""
    terms = masks.sums.terms
    whose = _drawn(terms.settings) if terms.varies else "a round's clients"
    active = terms.settings.active
    how = "even if it lies about keys or about who takes part" if active else "as long as it keeps to the protocol"
    return (
        f"the server is trusted: before it adds the noise it sees sums over {whose}; it keeps the noise{_coins(protection)} "
        f"secret; of the contributions it sees only these sums, {how}, {_colluding(terms.settings)}"
    )


def _of_shares(protection: Protection, masks: Masks) -> str:
    """With noise that the clients add inside sums."""
    terms, counted = masks.sums.terms, protection.shares.shares if protection.shares else 0
    least, chance = terms.least(masks.invited) - protection.beside, terms.choice(masks.invited).failure
    colluding = f"colluding with at most {least - counted} of" if least > counted else "colluding with none of"
    server, otherwise = _ACTIVE if terms.settings.active else _PASSIVE
    return (
        f"no single party: {server}, {colluding} the {masks.invited} clients invited to a sum, learns only noised sums, in "
        f"each of which the guarantee counts on {counted} shares of noise; no sum of fewer than {least} clients is "
        f"unmasked{_except(chance)}; {otherwise}"
    )


def _coins(protection: Protection) -> str:
    return " and its draws of cohorts" if protection.hides_cohort else ""


def _drawn(settings: SecureAggregationConfig) -> str:
    """The clients of a sum, where the server draws the cohort by secret coins."""
    drawn = "the clients that it draws"
    return f"{drawn}, of whom at least two are honest" if settings.active else f"{drawn}, possibly a single one"


def _colluding(settings: SecureAggregationConfig) -> str:
    """The number of clients that may collude with the server: a share, because rounds differ in size."""
    if not settings.corrupt:
        return "while no client colludes with it"
    return f"while at most {100 * settings.corrupt:g} % of a round's clients (rounded down) collude with it"


def _except(chance: float) -> str:
    """The probability of failure, rounded up to a power of two."""
    if not chance:
        return ""
    return f", except with a probability of at most 2^{-math.floor(-10 * math.log2(chance)) / 10:g} for each sum"


_OWN_MACHINE = "nobody but the client's own machine"
_PLAIN = "the server is trusted: it sees every contribution before it adds the noise"
_KEEPS = "a server that keeps to the protocol,"
_PASSIVE = (
    "a server that keeps to the protocol",
    "a server that lies could read a single client's contribution, protected only by that client's share of the noise",
)
_ACTIVE = (
    "any server, even one that lies",
    "the party that distributes the clients' signing keys is trusted to distribute the right ones",
)
