"""`secure-fed audit lying RUN_DIR|CONFIG.toml`: what a lying server learns from the contributions of a run's clients."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attacks.options import CANNOT_TELL, add_limit, cannot_tell, exit_status, limit_of
from secure_fed.config import RunConfig
from secure_fed.errors import ConfigError, UsageError
from secure_fed.runs.directory import read_facts

if TYPE_CHECKING:
    from attacks.adversary.lying_server import LyingServer

TRIALS, FEWEST_TRIALS = 20, 8  # with fewer, half of them with a member, even all right verdicts may be chance


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `audit lying`."""
    on = "a finished run, or the configuration of one to try"
    parser.add_argument("target", type=Path, metavar="RUN_DIR|CONFIG.toml", help=on)
    named = "make this attack only; may be repeated (traps, membership, replay, labels, ...)"
    parser.add_argument("--attack", action="append", default=[], metavar="NAME", help=named)
    trials = f"trials of each attack (default: {TRIALS})"
    parser.add_argument("--trials", type=int, default=TRIALS, metavar="N", help=trials)
    add_limit(parser, "rate", f"; with {CANNOT_TELL} if no attack applies")


def run(chosen: argparse.Namespace) -> int:
    """Try the attacks and print their rates; the exit status shows whether a working attack is above the limit."""
    if chosen.trials < FEWEST_TRIALS:
        raise ConfigError(f"--trials is {chosen.trials}; it must be at least {FEWEST_TRIALS}, to show anything")
    limit = limit_of(chosen.fail_above, "rate", "give rate= and a number from 0 to 1")
    config = None if chosen.target.is_dir() else RunConfig.load(chosen.target)
    if config is None:
        read_facts(chosen.target)
    from attacks.lying.trials import LIES, audited

    for name in chosen.attack:
        if name not in LIES:
            raise ConfigError(f"--attack is {name!r}, but the attacks of a lying server are {', '.join(LIES)}")
    found = audited(_server(chosen.target, config), list(dict.fromkeys(chosen.attack)) or list(LIES), chosen.trials)
    if chosen.attack and not any(one["applicable"] for one in found["cells"]):
        whys = "; ".join(f"{one['attack']}: {one['why']}" for one in found["cells"])
        raise UsageError(f"the attacks requested with --attack do not apply here. {whys}")
    print(json.dumps(found)) if chosen.json else _show(found)
    if chosen.fail_above is not None and not any(one["applicable"] for one in found["cells"]):
        return cannot_tell("none of the attacks applies here")
    working = [one for one in found["cells"] if one["applicable"] and one["works"]]
    rate = max((one["hits"] / max(1, one["of"]) for one in working), default=0.0)
    return exit_status(rate, limit, f"a rate of {rate:.2f} is above --fail-above rate={limit:g}")


def _server(path: Path, config: RunConfig | None) -> LyingServer:
    """The vantage in the last round of a finished run, repeated from its final tensors, or in the second round of a configured
    run.
    """
    from attacks.adversary.case import opened
    from attacks.adversary.lying_server import LyingServer
    from secure_fed.federation import Federation

    if config is None:
        target = opened(path)
        return LyingServer(target.assembly, target.final.round - 1, target.final.tensors)
    return LyingServer(Federation(config).assembly, min(1, config.federation.rounds - 1))


def _show(found: dict[str, Any]) -> None:
    from secure_fed.report.terminal import PlainConsole

    console = PlainConsole()
    console.print(
        f"A server that lies in round {found['round']} and reads {found['sees']}: {found['trials']} trials of each attack on "
        f"clients with {found['texts']} texts of the test set"
    )
    for one in found["cells"]:
        console.print(f"{one['title']} ({one['paper']})", style="bold")
        console.print(f"  {_said(one)}")
    console.print(
        "A rate here is for this federation, these attacks and this model. An attack that fails is no proof of safety."
    )


def _said(one: dict[str, Any]) -> str:
    if not one["applicable"]:
        return f"does not apply: {one['why']}"
    if one["refused"] and not one["hits"]:
        return f"refused: {one['why']}"
    low, high = one["interval"]
    verdict = "better than" if one["works"] else "not shown to be better than"
    alarms = f"; {one['false_alarms']} false alarms in {one['quiet']}" if one["quiet"] else ""
    share = one["hits"] / max(1, one["of"])
    return (
        f"{one['success']} in {share:.0%} of {one['of']} trials ({low:.0%} to {high:.0%}), {verdict} a guess, "
        f"which has {one['guess']:.1%}{alarms}"
    )
