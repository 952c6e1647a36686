"""The ways to guarantee one epsilon as a table, as JSON, and as settings to paste; for `secure-fed budget plan`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from protocols import wire
from protocols.errors import ParameterError
from protocols.parameters import Parameters
from protocols.thresholds import choose, counted_shares
from secure_fed.report.formatting import size
from secure_fed.report.terminal import NARROW, PlainConsole

if TYPE_CHECKING:
    from rich.table import Table

    from privacy.forecast import Setting, Way

_AGAINST = {1: "readers", 2: "participants", 3: "everyone"}
_SAMPLING = {"coins": "poisson"}  # as federation.sampling names it
_EXPLAINED = (
    "Holds against: readers of the models; participants, who also see who takes part, and readers; everyone, the server too. "
    "Poisson: secret coins draw each cohort. With central noise the server must keep them secret; with distributed noise all "
    "clients send in every round. Final noise: standard deviation on a coordinate of the sum of all rounds, in clip norms."
)
_LENGTH = (
    "Length: of the final noise, divided by the longest distance that the model can move. A tenth or less is small."
)


def noise_in_words(noise: str, correlation: str) -> str:
    """The noise of a way: "central", "correlated", "distributed" or "local"."""
    return "correlated" if correlation == "banded" else noise


def counted(clients: int, corrupt: float, dropout: float) -> int:
    """The number of honest clients' noise shares that a masked sum has at least; 0 if no masked sum of so many is possible."""
    from secure_fed.rounds.masked.terms import FEWEST

    if clients < FEWEST:
        return 0
    try:
        choose(clients, corrupt=corrupt, dropout=dropout, active=False)
    except ParameterError:
        return 0
    return counted_shares(clients, corrupt, dropout)


def facts(setting: Setting, way: Way, chosen: argparse.Namespace) -> dict[str, Any]:
    sent = sent_by_all(setting, way, chosen)
    return {**asdict(way), "noise_share": way.share(setting), "bytes_up_a_round": sent}


def sent_by_all(setting: Setting, way: Way, chosen: argparse.Namespace) -> int | None:
    """The bytes that each client sends in every round, if all clients send: `dim` masked words, and keys and shares.

    None for ways in which only the cohort sends, and without `dim`.
    """
    if (way.sampling, way.noise) != ("coins", "distributed") or setting.dim is None:
        return None
    everybody = choose(setting.clients, corrupt=chosen.corrupt, dropout=chosen.dropout, active=False)
    parameters = Parameters(
        run="plan",
        round=0,
        layout=bytes(32),
        length=setting.dim,
        bits=32,
        clients=tuple(range(setting.clients)),
        neighbours=everybody.neighbours,
        threshold=everybody.threshold,
        survivors=everybody.survivors,
        active=False,
        partners=everybody.partners,
    )
    return sum(stage.up for stage in wire.traffic(parameters).values())


def show(console: PlainConsole, setting: Setting, ways: list[Way], chosen: argparse.Namespace) -> None:
    """The table, and the settings of the recommended way."""
    console.print(_table(setting, ways))
    console.print(_EXPLAINED if setting.dim is None else f"{_EXPLAINED} {_LENGTH}")
    if any(way.correlation == "banded" for way in ways):
        band = next(way.band for way in ways if way.correlation == "banded")
        console.print(f"Correlated: central noise of which a part cancels over {band} rounds.")
    for sent in filter(None, (sent_by_all(setting, way, chosen) for way in ways)):
        console.print(
            f"With Poisson sampling and distributed noise each of the {setting.clients:,} clients sends about {size(sent)} in "
            f"every round: {size(setting.clients * setting.rounds * sent)} in {setting.rounds} rounds, over all clients."
        )
    console.print("\nRecommended settings:\n")
    console.print(settings(setting, next(way for way in ways if way.recommended), chosen))


def settings(setting: Setting, way: Way, chosen: argparse.Namespace) -> str:
    """The settings of a run with this way, as TOML; for ways with a public order."""
    federation: dict[str, Any] = {"clients": setting.clients, "cohort": setting.cohort, "rounds": setting.rounds}
    federation["sampling"] = way.sampling
    if chosen.momentum:
        federation |= {"server_optimizer": "momentum", "server_momentum": chosen.momentum}
    elif chosen.momentum is not None:
        federation["server_optimizer"] = "mean"
    asked = "epsilon" if chosen.epsilon is not None else "noise_multiplier"
    privacy = {"unit": "client", asked: getattr(chosen, asked), "delta": setting.delta}
    privacy |= {} if chosen.clip_norm is None else {"clip_norm": chosen.clip_norm}
    tables: dict[str, dict[str, Any]] = {
        "federation": federation,
        "privacy": privacy | {"noise": way.noise, "correlation": way.correlation},
    }
    if way.noise == "distributed":
        tables["secure_aggregation"] = {"enabled": True, "corrupt": chosen.corrupt, "dropout": chosen.dropout}
    sections = ("\n".join([f"[{name}]", *map(_line, keys.items())]) for name, keys in tables.items())
    return "\n\n".join(sections) + "\n"


def _line(item: tuple[str, Any]) -> str:
    name, value = item
    return f"{name} = {json.dumps(value)}"  # numbers, booleans and plain words are the same in TOML


def _table(setting: Setting, ways: list[Way]) -> Table:
    from rich.table import Column, Table

    whole = setting.dim is not None
    heads = ("", "sampling", "noise", "holds\nagainst")
    numeric = ("noise\nmultiplier", "epsilon", "final\nnoise", *(["length"] if whole else []))
    columns = [Column(head, no_wrap=True) for head in heads]
    columns += [Column(head, justify="right", no_wrap=True) for head in numeric]
    table = Table(*columns, title="Who is promised what", title_style="bold", **NARROW)
    for way in ways:
        numbers = [f"{way.noise_multiplier:.4g}", f"{way.epsilon:.3g}", f"{way.final_noise:.3g}"]
        share = way.share(setting)
        numbers += [] if share is None else [f"{share:.3f}"]
        mark, sampling = "->" if way.recommended else "", _SAMPLING.get(way.sampling, way.sampling)
        table.add_row(
            mark, sampling, noise_in_words(way.noise, way.correlation), _AGAINST[len(way.holds_against)], *numbers
        )
    return table
