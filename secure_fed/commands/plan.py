"""`secure-fed budget plan`: the guarantee of each way to add noise, for a target epsilon or for a noise multiplier."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from secure_fed.commands import loop_plan
from secure_fed.commands import ways as shown_ways
from secure_fed.errors import ConfigError
from secure_fed.learning.tasks import TASKS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from privacy.forecast import Forecast, Possible, Setting
    from privacy.plan import Target
    from secure_fed.commands.release_space import Space

_TARGETS = (1.0, 3.0, 8.0)
_OUTLOOKS = {
    "long": "long: the noise of a round is longer than any mean can be; length is not harm, which --model measures",
    "hard": "hard: the noise of a round is longer than a tenth of the longest mean; it has to average out over rounds",
    "fine": "fine: the noise of a round is shorter than a tenth of the longest mean",
}
_RAW = "This is the raw mean; FRA-LoRA can remove part of the noise, with method.denoise."


def add_to(made: argparse.ArgumentParser) -> None:
    given = made.add_mutually_exclusive_group(required=True)
    given.add_argument("--epsilon", type=float, help="the target, against readers of the models")
    given.add_argument("--noise-multiplier", type=float, metavar="Z", help="standard deviation over clip norm")
    made.add_argument("--delta", required=True, type=float, help="well below one over the number of units")
    loop_plan.add_options_of_loops(made)
    made.add_argument("--rounds", type=int)
    made.add_argument("--clients", type=int)
    made.add_argument("--cohort", type=int, help="clients a round, expected (poisson) or exact (fixed)")
    made.add_argument("--dim", type=int, help="how many numbers travel: see `secure-fed methods`")
    made.add_argument("--clip-norm", type=float, help="for noise in its unit (default: 1; a run chooses its own)")
    made.add_argument("--sampling", choices=("poisson", "fixed"), default="poisson", help="default: poisson")
    made.add_argument("--model", metavar="NAME", help="a model, to compare the methods by what they release on it")
    made.add_argument(
        "--pooling", choices=("model", "mean"), default="model", help="pooling of its head, as model.pooling"
    )
    made.add_argument(
        "--task", choices=tuple(TASKS), default="classification", help="with --model: count what this task trains"
    )
    made.add_argument(
        "--momentum", type=float, help="server momentum, which determines the band (default: 0.5, as in a run)"
    )
    made.add_argument(
        "--corrupt", type=_share, default=0.1, metavar="SHARE", help="as secure_aggregation.corrupt (default: 0.1)"
    )
    made.add_argument(
        "--dropout", type=_share, default=0.1, metavar="SHARE", help="as secure_aggregation.dropout (default: 0.1)"
    )
    made.add_argument("--json", action="store_true", help="print one JSON object")


def _share(written: str) -> float:
    """A share of clients, within the limits of the configuration's settings."""
    if not 0 <= (share := float(written)) < 0.5:
        raise argparse.ArgumentTypeError(f"{written} is no share of clients at least 0 and below 0.5")
    return share


def run(chosen: argparse.Namespace) -> None:
    """Print the guarantee of each way to add noise, the plan with coins, and plans for other targets and cohorts."""
    loop_plan.require_options(chosen)
    if chosen.unit == "example":
        return loop_plan.plan(chosen)
    from privacy import forecast
    from privacy.forecast import compared
    from privacy.plan import Target
    from secure_fed.report.terminal import PlainConsole, doing

    given = {field.name: getattr(chosen, field.name) for field in fields(forecast.Setting)}
    setting = forecast.Setting(**{name: value for name, value in given.items() if value is not None})
    target, possible = Target(chosen.epsilon, chosen.noise_multiplier, setting.delta), _possible(chosen, setting)
    with doing() as say:
        say("comparing the methods")
        methods = _methods(chosen, setting, target, possible, say)  # first: a missing model fails at once
        say("comparing the ways to the guarantee")
        ways = compared(setting, target, possible)
        say("calibrating the noise of coins")
        made, others = _of_coins(chosen, setting, say)
    if chosen.json:
        facts = [shown_ways.facts(setting, way, chosen) for way in ways]
        alternatives = [_plan_facts(other) for other in others]
        listed = [asdict(row) for row in methods]
        print(json.dumps({**_plan_facts(made), "alternatives": alternatives, "ways": facts, "methods": listed}))
        return
    console = PlainConsole()
    shown_ways.show(console, setting, ways, chosen)
    if methods:
        from secure_fed.commands import release_space

        release_space.show(console, chosen.model, methods)
    _show_coins(console, made, others)


def _show_coins(console: Console, made: Forecast, others: list[Forecast]) -> None:
    """The plan with cohorts drawn at random, and plans for other targets and cohorts."""
    drawn = "the first row above" if made.setting.sampling == "poisson" else "cohorts of a fixed size"
    console.print(
        f"The rest is about {drawn}: sampling = {made.setting.sampling!r}, noise = 'central'.\n", style="bold"
    )
    console.print(_plan_table(made))
    if made.outlook is not None:
        console.print(f"{_OUTLOOKS[made.outlook]}. {_RAW}")
    console.print()
    console.print(_alternatives_table(made.setting, others))
    console.print(
        "This last table is calibrated on a coarse grid: never above the target epsilon, with up to a few per cent more noise "
        "than needed."
    )


def _of_coins(
    chosen: argparse.Namespace, setting: Setting, say: Callable[[str], None]
) -> tuple[Forecast, list[Forecast]]:
    """The requested plan, and the plans for other targets and cohorts."""
    from privacy import forecast

    if chosen.epsilon is not None:
        made = forecast.for_epsilon(setting, chosen.epsilon)
    else:
        made = forecast.for_noise(setting, chosen.noise_multiplier)
    targets = sorted({*_TARGETS, *([chosen.epsilon] if chosen.epsilon is not None else [])})
    say("calibrating it for other targets and cohorts")
    return made, list(forecast.alternatives(setting, targets))


def _possible(chosen: argparse.Namespace, setting: Setting) -> Possible:
    """The possible ways: secure aggregation if enough clients remain for shares of noise."""
    from privacy.forecast import Possible
    from secure_fed.config.federation import MOMENTUM

    cohort, everybody = (
        shown_ways.counted(clients, chosen.corrupt, chosen.dropout) for clients in (setting.cohort, setting.clients)
    )
    momentum = MOMENTUM if chosen.momentum is None else chosen.momentum
    return Possible(cohort, everybody, momentum=momentum)


def _methods(
    chosen: argparse.Namespace, setting: Setting, target: Target, possible: Possible, say: Callable[[str], None]
) -> list[Space]:
    """The methods on the model of --model; empty without it."""
    if chosen.model is None:
        for name, usual in (("pooling", "model"), ("task", "classification")):
            if (value := getattr(chosen, name)) != usual:
                message = f"--{name} is {value}, and has no effect without --model; give both"
                raise ConfigError(message).about(f"--{name}", value, "--model")
        return []
    from secure_fed.commands import release_space

    return list(release_space.spaces(chosen.model, chosen.pooling, setting, target, possible, say, chosen.task))


def _plan_facts(made: Forecast) -> dict[str, Any]:
    setting = made.setting
    return {
        "noise_multiplier": made.noise_multiplier,
        "epsilon": made.epsilon,
        "epsilon_participants": made.epsilon_participants,
        "delta": setting.delta,
        "rounds": setting.rounds,
        "clients": setting.clients,
        "cohort": setting.cohort,
        "sampling": setting.sampling,
        "sampling_rate": setting.rate,
        "clip_norm": setting.clip_norm,
        "dim": setting.dim,
        "noise_std": made.noise_std,
        "noise_norm": made.noise_norm,
        "outlook": made.outlook,
    }


def _plan_table(made: Forecast) -> Table:
    from rich.table import Table

    setting = made.setting
    unit = "one client replaced" if setting.sampling == "fixed" else "one client added or removed"
    table = Table(show_header=False, title=f"{setting.rounds} rounds, delta = {setting.delta:g}", title_style="bold")
    table.add_row("noise multiplier", f"{made.noise_multiplier:g}")
    table.add_row("epsilon", f"{made.epsilon:.4g} against readers of the models ({unit})")
    table.add_row(
        "epsilon_participants", f"{made.epsilon_participants:.4g} against participants, who also see each cohort"
    )
    table.add_row("sampling rate", f"{setting.rate:.4g} ({setting.cohort} of {setting.clients}, {setting.sampling})")
    table.add_row("noise on a mean", f"{made.noise_std:.4g} a coordinate (clip norm {setting.clip_norm:g})")
    if made.noise_norm is not None:
        table.add_row(
            "", f"{made.noise_norm:.4g} for all {setting.dim:,} together, of a mean of at most {setting.clip_norm:g}"
        )
    return table


def _alternatives_table(setting: Setting, others: list[Forecast]) -> Table:
    from rich.table import Table

    whole = setting.dim is not None
    says = (
        "by cohort: noise multiplier, and length of the noise on a round's mean"
        if whole
        else "by cohort: noise multiplier, and noise on a coordinate of a round's mean"
    )
    table = Table("epsilon", title=says)
    cohorts = sorted({other.setting.cohort for other in others})
    for cohort in cohorts:
        table.add_column(f"{cohort}", justify="right")
    for target in sorted({other.epsilon for other in others}):
        row = [other for other in others if other.epsilon == target]
        cells = [f"{one.noise_multiplier:.3f}, {one.noise_norm if whole else one.noise_std:.3g}" for one in row]
        table.add_row(f"{target:g}", *cells)
    return table
