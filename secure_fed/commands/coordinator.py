"""`secure-fed coordinator`: found a federation, and look at its charter."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from secure_fed.activity import activity


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """The actions of `secure-fed coordinator`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    init = actions.add_parser("init", help="make the coordinator's folder and key, and print the key's fingerprint")
    init.set_defaults(run=_init)
    found = actions.add_parser("found", help="write and sign the charter: settings, and who takes part with which key")
    found.set_defaults(run=_found)
    show = actions.add_parser("show", help="print the charter: members, keys and terms")
    show.set_defaults(run=_show)
    sizes = actions.add_parser("sizes", help="how many members may collude or vanish, by the number in a round")
    sizes.set_defaults(run=_sizes)
    sizes.add_argument("members", type=int, nargs="*", default=(2, 3, 4, 5, 8), metavar="N", help="default: 2 3 4 5 8")
    for action in (init, found, show):
        action.add_argument("folder", type=Path, metavar="FOLDER", help="the coordinator's folder")
    found.add_argument("cards", type=Path, nargs="+", metavar="CARD", help="card.json of a node")
    found.add_argument("--name", required=True, help="the federation's name")
    found.add_argument(
        "--config", metavar="CONFIG.toml", help="settings, as for a simulation; without it, the defaults"
    )
    found.add_argument("--set", action="append", default=[], metavar="section.key=value", help="change one setting")
    show.add_argument("--json", action="store_true", help="print the charter as one JSON object")


def _init(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment import home
    from secure_fed.deployment.charter import fingerprint

    home.new_folder(chosen.folder, "secure-fed coordinator init")
    key = home.write_key(chosen.folder / home.COORDINATOR_KEY)
    print(fingerprint(key.public))
    print("secure-fed: give this fingerprint to the owners of nodes, by another way than this network", file=sys.stderr)


def _found(chosen: argparse.Namespace) -> None:
    from secure_fed.config import RunConfig
    from secure_fed.deployment.charter import MEMBERS
    from secure_fed.deployment.home import CHARTER, COORDINATOR_KEY, MEMBERS_TOML, read_card, read_key

    read_key(chosen.folder / COORDINATOR_KEY)  # refused here, before torch is loaded; `found` reads it
    members = [read_card(card) for card in chosen.cards]
    config = RunConfig.load(chosen.config, [*chosen.set, f"data.train={MEMBERS}"])
    with activity("checking the settings, and what the noise alone does to the model"):
        from secure_fed.deployment.coordinator import found, notes  # it loads torch

        charter = found(chosen.folder, config, members, chosen.name)
    print(f"{chosen.folder / CHARTER}: {len(charter.members)} members, digest {charter.digest.hex()[:16]}")
    print(f"{chosen.folder / MEMBERS_TOML}: their fingerprints, for owners to compare and to put into their policies")
    for sentence in notes(charter):
        print(f"secure-fed: {sentence}", file=sys.stderr)


def _sizes(chosen: argparse.Namespace) -> None:
    """A table of the losses and colluders that a round of so many members withstands, at the default shares."""
    from protocols.thresholds import FEWEST, colluding, counted_shares, losses, surviving
    from secure_fed.config import SecureAggregationConfig

    masks = SecureAggregationConfig()
    head = "members in a round | may collude | may vanish | at most, active | at most, not active | shares of noise"
    rows: list[Sequence[object]] = [head.split(" | "), ["---"] * 6]
    for cohort in chosen.members:
        if cohort < FEWEST:
            rows.append([cohort, "no masked sum", *[""] * 4])
            continue
        most = [losses(cohort, corrupt=masks.corrupt, active=active) for active in (True, False)]
        vanish, shares = cohort - surviving(cohort, masks.dropout), counted_shares(cohort, masks.corrupt, masks.dropout)
        rows.append([cohort, colluding(cohort, masks.corrupt), vanish, *most, shares])
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")


def _show(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment.home import CoordinatorHome

    charter = CoordinatorHome.load(chosen.folder).charter
    print(charter.text if chosen.json else "\n".join(charter.described()))
