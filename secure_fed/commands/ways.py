"""The ways to guarantee one epsilon as a table, as JSON, and as settings to paste; for `secure-fed budget plan`."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from protocols import costs
from protocols.choice import choose, colluding
from protocols.errors import ParameterError
from protocols.parameters import Parameters
from secure_fed.report.terminal import PlainConsole

if TYPE_CHECKING:
    from rich.table import Table

    from privacy.planning import Setting
    from privacy.promises import Way

_AGAINST = {1: "readers", 2: "and participants", 3: "everyone"}
_EXPLAINED = (
    "Everyone: the server too. Final noise: standard deviation on a coordinate of the sum of all rounds, in clip norms. Coins "
    "with central noise need a server that keeps the cohort secret; with distributed noise all clients send in every round."
)
_LENGTH = (
    "Length: of the noise on the final model, over the longest way that the model can travel. A tenth or less is small."
)


def counted(clients: int, corrupt: float, dropout: float) -> int:
    """The number of honest clients' noise shares that a masked sum of `clients` clients has at least; 0 if too few to mask."""
    from secure_fed.rounds.masked.terms import FEWEST

    if clients < FEWEST:
        return 0
    try:
        survivors = choose(clients, corrupt=corrupt, dropout=dropout, active=False).survivors
    except ParameterError:
        return 0
    return max(0, survivors - colluding(clients, corrupt))


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
    return sum(stage.up for stage in costs.traffic(parameters).values())


def show(console: PlainConsole, setting: Setting, ways: list[Way], chosen: argparse.Namespace) -> None:
    """The table, and the settings of the recommended way."""
    console.print(_table(setting, ways))
    console.print(_EXPLAINED if setting.dim is None else f"{_EXPLAINED} {_LENGTH}")
    for sent in filter(None, (sent_by_all(setting, way, chosen) for way in ways)):
        whole = setting.clients * setting.rounds * sent / 1e6
        console.print(
            f"With coins and distributed noise each of the {setting.clients:,} clients sends about {sent / 1e6:.3g} MB in "
            f"every round: {whole:,.3g} MB in {setting.rounds} rounds, over all clients."
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
    from rich.table import Table

    whole = setting.dim is not None
    table = Table("", "sampling", "noise", "band", title="Who is promised what", title_style="bold")
    table.add_column("holds against")
    for head in ("noise multiplier", "epsilon", "final noise", *(["length"] if whole else [])):
        table.add_column(head, justify="right")
    for way in ways:
        numbers = [f"{way.noise_multiplier:.4g}", f"{way.epsilon:.3g}", f"{way.final_noise:.3g}"]
        share = way.share(setting)
        numbers += [] if share is None else [f"{share:.3f}"]
        band = str(way.band) if way.correlation == "banded" else ""
        mark = "->" if way.recommended else ""
        table.add_row(mark, way.sampling, way.noise, band, _AGAINST[len(way.holds_against)], *numbers)
    return table
