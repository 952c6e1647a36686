"""Who has to be trusted, in words: for a guarantee, and where there are masks and no guarantee.

What masks keep from the server depends on two assumptions, which every sentence here names: whether the server keeps to the
protocol, and how many clients are in league with it.
"""

from __future__ import annotations

import math

from secure_fed.config import SecureAggregationConfig
from secure_fed.rounds.masked.wiring import Masks
from secure_fed.rounds.protection import Protection


def trusted(protection: Protection, masks: Masks | None) -> str:
    """Who could break the guarantee of a private run."""
    if protection.placement.local:
        return _OWN_MACHINE if masks is None else f"{_OWN_MACHINE}, with masks or without"
    if masks is None:
        return _PLAIN
    return _of_sums(masks) if protection.placement.server_noise else _of_shares(protection, masks)


def only_masks(settings: SecureAggregationConfig, *, coins: bool) -> str:
    """What protects the clients of a run with secure aggregation and without privacy. coins: whether these draw its cohorts."""
    server = _KEEPS if not settings.active else "the server, even one that lies about keys, or about who is there,"
    lies = "" if settings.active else " A server that lies may read single clients."
    whose = _drawn(settings) if coins else "a round's clients"
    return (
        f"No differential privacy: secure aggregation keeps every client's contribution from {server} {_league(settings)}. It "
        f"learns sums over {whose}.{lies} Nothing bounds what these sums and the model reveal of the "
        "training data."
    )


def _of_sums(masks: Masks) -> str:
    """With noise that the server adds to sums."""
    terms = masks.sums.terms
    whose = f"of {_drawn(terms.settings)}" if terms.varies else "of a round's clients"
    active = terms.settings.active
    how = "even if it lies about keys or about who is there" if active else "as long as it keeps to the protocol"
    return (
        f"the server sees sums of contributions before the noise, {whose}, and is trusted with them, as are the noise that it "
        f"adds and the coins it draws cohorts with; of contributions it sees no more than such sums, {how}, "
        f"{_league(terms.settings)}"
    )


def _of_shares(protection: Protection, masks: Masks) -> str:
    """With noise that the clients bring into sums."""
    terms, counted = masks.sums.terms, protection.shares.shares if protection.shares else 0
    least, chance = terms.least(masks.invited) - protection.beside, terms.choice(masks.invited).failure
    league = f"in league with at most {least - counted} of" if least > counted else "in league with none of"
    server, otherwise = _ACTIVE if terms.settings.active else _PASSIVE
    return (
        f"no single party: {server}, {league} the {masks.invited} clients invited to a sum, learns noised sums alone, for "
        f"which the guarantee counts on {counted} shares of noise; no sum of fewer than {least} clients is "
        f"unmasked{_except(chance)}; {otherwise}"
    )


def _drawn(settings: SecureAggregationConfig) -> str:
    """Over whom a sum is, where the server's coins draw the cohort."""
    drawn = "those that its coins draw"
    return f"{drawn}, of whom two at least are honest" if settings.active else f"{drawn}, be it one alone"


def _league(settings: SecureAggregationConfig) -> str:
    """How many clients may be in league with the server: a share, since its words are of rounds of any size."""
    if not settings.corrupt:
        return "with no client in league with it"
    return f"with at most {100 * settings.corrupt:g} % of a round's clients, rounded down, in league with it"


def _except(chance: float) -> str:
    """What is left to chance, rounded up to a power of two."""
    if not chance:
        return ""
    return f", except with a probability of at most 2^{-math.floor(-10 * math.log2(chance)) / 10:g} for each sum"


_OWN_MACHINE = "nobody but the client's own machine"
_PLAIN = "the server sees every contribution before the noise and is trusted, as are the coins it draws cohorts with"
_KEEPS = "a server that keeps to the protocol,"
_PASSIVE = (
    "a server that keeps to the protocol",
    "one that lies could read a client with no noise but that client's share",
)
_ACTIVE = (
    "a server, whatever it does",
    "whoever hands out the clients' signing keys is trusted to hand out the right ones",
)
