"""`secure-fed node`: a node's folder, the node itself, its federations, and the log of its requests."""

from __future__ import annotations

import argparse
import calendar
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secure_fed.activity import activity

if TYPE_CHECKING:
    from secure_fed.flower.supernode import Link


def add_parsers(parser: argparse.ArgumentParser) -> None:
    """The actions of `secure-fed node`."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")

    def action(name: str, run: Callable[..., int | None], does: str, **more: Any) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=does, **more)
        made.set_defaults(run=run)
        return made

    init = action("init", _init, "make a node's folder, its key and its card, and print its fingerprint")
    card = action("card", _card, "write the card anew, after a change of name or units in node.toml")
    does = "what a charter asks, what it would cost, and what this node answers; changes nothing"
    check = action("check", _check, does, description=does)
    agreeing = 'accept a federation that waits for this node\'s owner (accept = "ask" in node.toml)'
    accept = action("accept", _accept, agreeing, description=agreeing)
    agent = action("agent", _agent, "take part: the half that has key, ledger and data, for `connect`")
    talking = "take part: the half that talks to a SuperLink of Flower, under another user than `agent`"
    connect = action("connect", _connect, talking)
    running = action("run", _run, "take part, with both halves under one user: for trials")
    shows = "requests to this node, its refusals, its federations, and its budget"
    meaning = (
        "exit status: 0 healthy, 1 not connected, 2 the last request was refused, or a federation waits for its owner"
    )
    status = action("status", _status, shows, description=shows, epilog=meaning)
    closing = "close a federation at this node for good, and give back a reservation for which the node made no step"
    release = action("release", _release, closing, description=closing)
    replace = action("replace-key", _replace_key, "give the node a new identity; the old key is put aside")
    for one in (init, card, check, accept, agent, running, status, release, replace):
        one.add_argument("folder", type=Path, metavar="FOLDER", help="the node's folder")
    check.add_argument("charter", type=Path, metavar="CHARTER", help="charter.json of the coordinator")
    for one in (accept, release):
        one.add_argument("federation", metavar="FEDERATION", help="its name, or the first digits of its digest")
    init.add_argument("--train", required=True, nargs="+", metavar="FILE", help="this node's examples")
    init.add_argument(
        "--coordinator", required=True, metavar="FINGERPRINT", help="fingerprint of the coordinator's key"
    )
    init.add_argument("--name", help="name in the federation (default: the folder's name)")
    units = "number of examples or persons, if these are protected"
    init.add_argument("--units", type=int, default=0, metavar="N", help=units)
    agent.add_argument("--socket", type=Path, required=True, metavar="FILE", help="where `connect` reaches the agent")
    whose = "primary group of the user of `connect`; this user is in it, too"
    agent.add_argument("--group", required=True, metavar="GROUP", help=whose)
    connect.add_argument("folder", type=Path, metavar="FOLDER", help="for the log and Flower's files, not the node's")
    connect.add_argument("--agent", type=Path, required=True, metavar="FILE", help="--socket of `agent`")
    for one in (connect, running):
        one.add_argument("--superlink", required=True, metavar="HOST:PORT", help="Flower's server, or its proxy")
        authority = "PEM of the authority for its certificate"
        one.add_argument("--root-certificates", type=Path, metavar="FILE", help=authority)
        one.add_argument("--insecure", action="store_true", help="without TLS, for trials on one machine")
        known = "private key by which the SuperLink knows this node"
        one.add_argument("--auth-key", type=Path, metavar="FILE", help=known)
        one.add_argument("--port", type=int, default=0, help="local port of the SuperNode (default: one that is free)")
    status.add_argument("--json", action="store_true", help="print one JSON object")
    long = "not connected after so long without a request of a federation that goes on (default: 3600)"
    status.add_argument("--silent", type=float, default=3600.0, metavar="SECONDS", help=long)


def _init(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment import home
    from secure_fed.deployment.charter import fingerprint

    made = home.new_node(
        chosen.folder,
        name=chosen.name or chosen.folder.absolute().name,
        train=[str(Path(one).expanduser().absolute()) for one in chosen.train],
        coordinator=chosen.coordinator,
        units=chosen.units,
    )
    print(fingerprint(made.identity.public))
    print(
        f"secure-fed: read the policy in {chosen.folder / home.NODE}, then send {chosen.folder / home.CARD} to the "
        "coordinator",
        file=sys.stderr,
    )


def _card(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment import home

    print(home.write_card(home.Home.load(chosen.folder)))


def _replace_key(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment import home
    from secure_fed.deployment.charter import fingerprint

    replaced = home.replace_key(chosen.folder)
    print(fingerprint(replaced.identity.public))
    print(
        "secure-fed: federations that know the old key no longer know this node: send the new card to the coordinator",
        file=sys.stderr,
    )


def _check(chosen: argparse.Namespace) -> int:
    from secure_fed.deployment.home import Home, read_charter
    from secure_fed.deployment.memberships import closed, require_few
    from secure_fed.deployment.policy import objections

    home, charter = Home.load(chosen.folder), read_charter(chosen.charter)
    print(*charter.described(), sep="\n")
    refusals = [*objections(home.policy, charter)]
    if closed(home.federation(charter.digest)):
        refusals.append("its owner has closed it at this node, for good")
    for sentence in refusals:
        print(f"refused: {sentence}")
    if refusals:
        return 2
    require_few(home, charter)
    with activity("looking at the model and the data"):
        from secure_fed.deployment.node import cost_of

        cost = cost_of(home, charter)
    print(f"admitted by the policy; {cost or 'it costs no budget: it has no guarantee'}")
    if home.policy.accept == "ask":
        print(f"once it is offered: secure-fed node accept {home.folder} {charter.digest.hex()[:12]}")
    return 0


def _accept(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment.home import Home
    from secure_fed.deployment.memberships import agree

    found = agree(Home.load(chosen.folder), chosen.federation)
    if found.charter:
        print(*found.charter.described(), sep="\n")
    print(f"accepted: {found.name} ({found.digest}); this node joins at the coordinator's next offer")


def _agent(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment.agent import Shared, run

    run(chosen.folder, Shared.of(chosen.socket, chosen.group))


def _connect(chosen: argparse.Namespace) -> None:
    from secure_fed.flower.supernode import connect

    connect(chosen.folder, chosen.agent, _link(chosen))


def _run(chosen: argparse.Namespace) -> None:
    from secure_fed.flower.supernode import run

    run(chosen.folder, _link(chosen))


def _link(chosen: argparse.Namespace) -> Link:
    from secure_fed.flower.supernode import Link

    return Link(chosen.superlink, chosen.root_certificates, chosen.insecure, chosen.auth_key, chosen.port)


def _release(chosen: argparse.Namespace) -> None:
    from secure_fed.deployment.home import Home
    from secure_fed.deployment.memberships import release

    print(release(Home.load(chosen.folder), chosen.federation))


def _status(chosen: argparse.Namespace) -> int:
    found = _found(chosen.folder)
    status, why = _health(found, chosen.silent)
    if chosen.json:
        print(json.dumps(found | {"status": status, "why": why}))
        return status
    print(f"{found['name']}  {found['fingerprint']}  {('healthy', 'not connected', 'refused')[status]}: {why}")
    spent = found["spent"]
    if spent:
        for name in ("epsilon", "delta"):
            print(f"spent: {name} {spent[name]:.4g} of {spent[f'most_{name}']:.4g}")
    if found["federations"]:
        print("federations:")
    for one in found["federations"]:
        print(f"  {one['digest']}  {one['name'] or '(accepted by an earlier version)'}  {_state(one)}")
        for line in (*one["charter"], *_of_model(one)):
            print(f"      {line}")
    titles = {"last": "lately", "refused": "refused lately", "strangers": "lately, not from a coordinator in node.toml"}
    for name, title in titles.items():
        if found[name]:
            print(f"{title}:")
        for line in found[name]:
            print(f"  {line['time']}  {line['federation'] or '-'}  {line['what']}")
    return status


def _health(found: dict[str, Any], silent: float) -> tuple[int, str]:
    """Exit status and reason. silent: the seconds without a request after which a node counts as not connected."""
    if not found["running"]:
        return 1, "the agent does not run"
    if waiting := [one["digest"] for one in found["federations"] if one["waiting"]]:
        return 2, f"a federation waits for its owner: secure-fed node accept {waiting[0]}"
    if not found["last"]:
        return 1, "no coordinator has reached it yet"
    last = found["last"][-1]
    if last["refused"]:
        return 2, f"the last request was refused: {last['what']}"
    since = time.time() - calendar.timegm(time.strptime(last["time"], "%Y-%m-%dT%H:%M:%SZ"))
    if since > silent and last["asked"] != "end":
        return 1, f"no request for {since:.0f} s, and the last federation has not ended"
    return 0, f"last request {last['time']}"


def _state(found: dict[str, Any]) -> str:
    """A federation's cost and the part of it that the node has reserved, in words."""

    def words(cost: dict[str, float]) -> str:
        return f"epsilon {cost['epsilon']:.4g} and delta {cost['delta']:.3g}"

    going = "ended" if found["model"] else "open"
    state = "closed" if found["closed"] else "waits for its owner" if found["waiting"] else going
    if found["last_contact"]:
        state += f", {found['rounds']} of {found['of_rounds'] or '?'} rounds, last contact {found['last_contact']}"
    if found["reserved"]:
        return f"{state}, {words(found['reserved'])} reserved, {found['charged']} releases charged"
    if found["given_back"]:
        return f"{state}, its reservation was given back"
    return (
        f"{state}, would cost {words(found['cost'])}, none of it reserved"
        if found["cost"]
        else f"{state}, no guarantee"
    )


def _of_model(found: dict[str, Any]) -> Iterator[str]:
    """Where the final model is, and the figure of this node's rows."""
    if not found["model"]:
        return
    yield f"final model  secure-fed predict {found['model']}; secure-fed export {found['model']} OUT_DIR"
    figure = found["membership_of_rows"]
    if figure is None:
        yield "membership   not measured: node.toml names no non_members"
    elif figure["auc"] is None:
        yield f"membership   {figure['why']}"
    else:
        low, high = figure["auc_interval"]
        yield (
            f"membership   AUC {figure['auc']:.3f} ({low:.3f} to {high:.3f}) of {figure['members']} rows that trained here "
            f"against {figure['non_members']}; not noised, so for this node's owner alone"
        )


def _found(folder: Path) -> dict[str, Any]:
    from privacy.ledger import Ledger
    from secure_fed.deployment import relay
    from secure_fed.deployment.charter import fingerprint
    from secure_fed.deployment.home import LEDGER, Home, Journal
    from secure_fed.deployment.memberships import NodeLedger, memberships

    home, journal = Home.load(folder), Journal(folder)
    ledger, spent = None, None
    if (folder / LEDGER).exists():
        ledger = Ledger.open(folder / LEDGER)
        cost, limits = ledger.spent(), NodeLedger.of(home).limits(ledger)
        spent = {"epsilon": cost.epsilon, "delta": cost.delta, "most_epsilon": limits[0], "most_delta": limits[1]}
    return {
        "name": home.name,
        "fingerprint": fingerprint(home.identity.public),
        "running": relay.running(folder),
        "spent": spent,
        "federations": [one.facts(ledger) for one in memberships(home)],
        "last": journal.last(10),
        "refused": journal.last(10, refused=True),
        "strangers": journal.last(3, known=False),
    }
