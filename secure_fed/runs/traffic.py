"""The expected traffic, in words, for the user who starts a run in which all clients send in every round."""

from __future__ import annotations

from secure_fed.runs.assembly import Assembly


def hidden_cohort_traffic(assembly: Assembly) -> str:
    """The bytes that a client sends and receives in a round of a hidden cohort, and all clients in the run; "" without one."""
    if not assembly.protection.hidden:
        return ""
    server, clients = assembly.server, len(assembly.clients)
    senders, rounds = clients + len(assembly.phantoms), assembly.config.federation.rounds
    up, down = server.traffic(assembly.initial, server.plan(assembly.initial), clients)  # the model goes to everybody
    each, back, whole = map(_megabytes, (up / senders, down / senders, rounds * (up + down)))
    return (
        f"privacy.hidden_cohort = true: each of the {clients:,} clients sends {each} and receives {back} in every round, "
        f"whether it trains or not, which makes {whole} for all clients over the whole run"
    )


def _megabytes(bytes_: float) -> str:
    return f"{bytes_ / 1e6:.3g} MB" if bytes_ < 1e9 else f"{bytes_ / 1e6:,.0f} MB"
