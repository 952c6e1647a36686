"""`secure-fed budget plan`: the guarantee of each way to add noise, for a target epsilon or for a noise multiplier.

For a federation's clients it prints four tables: the ways to one guarantee, with settings to paste; the methods on a model, by
the noise that each of them releases (`budget_methods`); the plan whose cohorts are drawn at random; and this plan for other
targets and cohorts. With --unit example it prints the noise and the steps of a training loop of the user's own, and with --unit
person those of one client that protects persons.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from protocols import wire
from protocols.errors import ParameterError
from protocols.parameters import Parameters
from protocols.thresholds import FEWEST, choose, counted_shares
from secure_fed.activity import activity
from secure_fed.errors import ConfigError
from secure_fed.learning.tasks import TASKS
from secure_fed.report.formatting import size
from secure_fed.report.terminal import FACTS, NARROW, PlainConsole, table_of

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from privacy.forecast import Forecast, Possible, Setting, Way
    from privacy.plan import Target
    from secure_fed.commands.budget_methods import Space

_TARGETS = (1.0, 3.0, 8.0)
_AGAINST = {1: "model", 2: "clients", 3: "server"}
_SAMPLING = {"coins": "poisson"}  # as federation.sampling names it
_OUTLOOKS = {
    "long": "long: the noise of a round is longer than any mean can be; length is not harm, which --model measures",
    "hard": "hard: the noise of a round is longer than a tenth of the longest mean; it has to average out over rounds",
    "fine": "fine: the noise of a round is shorter than a tenth of the longest mean",
}
_RAW = "This is the raw mean; FRA-LoRA can remove part of the noise, with method.denoise."
_ABOUT_WAYS = (
    "Holds against: model: whoever gets the final model, or that of any round; clients: also the other clients, who see who "
    "takes part; server: also the server, which with distributed noise must follow the protocol. Poisson: secret coins draw "
    "each cohort. With central noise the server must keep them secret; with distributed noise all clients send in every round. "
    "Final noise: standard deviation on a coordinate of the sum of all rounds, in clip norms."
)
_LENGTH = (
    "Length: of the final noise, divided by the longest distance that the model can move. A tenth or less is small."
)
_ABOUT_METHODS = (
    "Numbers: the noised numbers of a round; one that is sent in two passes counts twice; of FRA only those whose noise "
    "reaches the model. Noise: the way with the least noise for this method. Length: of the final noise, divided by the "
    "longest distance that these numbers can move; it is not harm, since a large model is flat in most directions. Not counted "
    "in it: products of noised factors, and that noise cancels less if a method's space changes between rounds (FRA)."
)
_LONGER = (
    "Longer below: with smaller cohorts the noise is longer than that distance, whatever central noise is chosen. What it does "
    "to the model is measured where its weights are here."
)
_PROBED = (
    "Loss: where the final noise alone takes it, on made-up texts, at this run's steps and, after the slash, at the steps of a "
    "run without noise, where the server shortens them. It decides: long noise may be harmless. Hopeless: the noise takes the "
    "model to chance; larger cohorts, among as many times more clients, would do."
)
_WHOM = {"example": "whoever gets the model", "person": "whoever gets the model, the other clients and the server"}
_FOR_A_LOOP = "For `secure_fed.private.wrap`, which computes the same noise from the same numbers."
_FOR_A_PERSON = (
    "For privacy.unit = 'person' with privacy.person_column and training.batch_size as here; the epochs are federation.rounds "
    "times training.epochs. Of a person at most privacy.person_examples examples enter a step: more cost time, and neither "
    "epsilon nor noise, since all of a person's examples in a step are clipped together."
)
# The options of each unit's plan, with their defaults.
_OF_CLIENTS: dict[str, object] = {
    **{"rounds": None, "clients": None, "cohort": None, "dim": None, "model": None, "sampling": "poisson"},
    **{"pooling": "model", "task": "classification", "momentum": None, "corrupt": 0.1, "dropout": 0.1},
}
_STEPS: dict[str, object] = dict.fromkeys(("batch_size", "epochs", "steps"))
_OPTIONS = {"client": _OF_CLIENTS, "example": {"examples": None, **_STEPS}, "person": {"persons": None, **_STEPS}}


def add_to(made: argparse.ArgumentParser) -> None:
    given = made.add_mutually_exclusive_group(required=True)
    given.add_argument("--epsilon", type=float, help="the target, against whoever gets the model")
    given.add_argument("--noise-multiplier", type=float, metavar="Z", help="standard deviation over clip norm")
    made.add_argument("--delta", required=True, type=float, help="well below one over the number of units")
    made.add_argument(
        "--unit", choices=tuple(_OPTIONS), default="client", help="protected unit: a federation's clients, the examples "
        "in a training loop of your own, or the persons of one client (default: client)"
    )  # fmt: skip
    made.add_argument("--examples", type=int, metavar="N", help="with --unit example: in the data set")
    made.add_argument("--persons", type=int, metavar="N", help="with --unit person: at the client with the fewest")
    made.add_argument("--batch-size", type=int, metavar="B", help="of examples or persons: expected in a step")
    made.add_argument("--epochs", type=int, metavar="E", help="of examples or persons: epochs of ceil(N / B) steps")
    made.add_argument("--steps", type=int, help="of examples or persons: steps of all rounds, instead of epochs")
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
    _require_options(chosen)
    if chosen.unit != "client":
        return _plan_loop(chosen)
    from privacy import forecast
    from privacy.forecast import compared
    from privacy.plan import Target

    given = {field.name: getattr(chosen, field.name) for field in fields(forecast.Setting)}
    setting = forecast.Setting(**{name: value for name, value in given.items() if value is not None})
    target, possible = Target(chosen.epsilon, chosen.noise_multiplier, setting.delta), _possible(chosen, setting)
    with activity("comparing the methods") as now:
        methods = _methods(chosen, setting, target, possible, now.says)  # first: a missing model fails at once
        now.says("comparing the ways to the guarantee")
        ways = compared(setting, target, possible)
        now.says("calibrating the noise of cohorts drawn at random")
        made = (
            forecast.for_epsilon(setting, chosen.epsilon)
            if chosen.epsilon is not None
            else forecast.for_noise(setting, chosen.noise_multiplier)
        )
        now.says("calibrating it for other targets and cohorts")
        others = forecast.alternatives(setting, sorted({*_TARGETS, chosen.epsilon} - {None}))
    if chosen.json:
        facts = [
            {**asdict(way), "noise_share": way.share(setting), "bytes_up_a_round": _sent_by_all(setting, way, chosen)}
            for way in ways
        ]
        alternatives = [_plan_facts(other) for other in others]
        listed = [asdict(row) for row in methods]
        print(json.dumps({**_plan_facts(made), "alternatives": alternatives, "ways": facts, "methods": listed}))
        return
    console = PlainConsole()
    _show_ways(console, setting, ways, chosen)
    if methods:
        show_methods(console, chosen.model, methods)
    _show_coins(console, made, others)


def _require_options(chosen: argparse.Namespace) -> None:
    """ConfigError if an option of the unit's plan is missing, or an option of another unit's plan is set."""
    for name, default in (one for options in _OPTIONS.values() for one in options.items()):
        if (value := getattr(chosen, name)) != default and name not in _OPTIONS[chosen.unit]:
            raise ConfigError(
                f"{_option(name)} is {value}, and has no effect with --unit {chosen.unit}; leave it out"
            ).about(_option(name), value, f"--unit {chosen.unit}")
    for name in ("rounds", "clients", "cohort") if chosen.unit == "client" else (f"{chosen.unit}s", "batch_size"):
        if getattr(chosen, name) is None:
            raise ConfigError(f"{_option(name)} is not given, and a plan with --unit {chosen.unit} needs it").about(
                _option(name), None, "a number"
            )
    if chosen.momentum is not None and not 0 <= chosen.momentum < 1:
        message = f"--momentum is {chosen.momentum:g}, but it must be at least 0 and below 1"
        raise ConfigError(message).about("--momentum", chosen.momentum, "at least 0 and below 1")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _plan_loop(chosen: argparse.Namespace) -> None:
    """Print the noise and steps, or the cost, of a user's own training loop (`secure_fed.private`) or of a client's persons."""
    from secure_fed.own_loop.account import Allowance, Terms

    unit, units = chosen.unit, f"{chosen.unit}s"
    terms = Terms(getattr(chosen, units), chosen.batch_size, chosen.delta, chosen.epochs, chosen.steps)
    made = terms.plan(chosen.epsilon, chosen.noise_multiplier)
    clip_norm = 1.0 if chosen.clip_norm is None else chosen.clip_norm
    epsilon = made.epsilon() if chosen.epsilon is None else chosen.epsilon
    sensitivity = clip_norm if unit == "person" else Allowance.of(terms, epsilon, clip_norm).sensitivity
    facts: dict[str, Any] = {
        "unit": unit,
        "noise_multiplier": made.noise_multiplier,
        "steps": terms.count,
        "steps_an_epoch": terms.epoch,
        "epsilon": made.epsilon(),
        "delta": terms.delta,
        units: terms.examples,
        "batch_size": terms.batch_size,
        "sampling_rate": terms.sampler.rate,
        "clip_norm": clip_norm,
        "sensitivity": sensitivity,
        "noise_std": made.noise_multiplier * sensitivity / terms.sampler.expected,
    }
    if unit == "person":
        facts["epsilon_at_two_clients"] = made.epsilon(2 * terms.count)
    if chosen.json:
        print(json.dumps(facts))
        return
    bound = f"clip norm {clip_norm:g}, sensitivity {sensitivity:.4g}"
    rows = [
        ("noise multiplier", f"{made.noise_multiplier:g}"),
        ("steps", f"{terms.count} ({terms.epoch} an epoch)"),
        ("epsilon", f"{facts['epsilon']:.4g} against {_WHOM[unit]} (one {unit} added or removed)"),
        ("sampling rate", f"{terms.sampler.rate:.4g} ({terms.batch_size} of {terms.examples}, poisson)"),
        ("noise on a mean", f"{facts['noise_std']:.4g} a coordinate ({bound})"),
    ]
    if unit == "person":
        rows.append(("a person at two clients", f"epsilon {facts['epsilon_at_two_clients']:.4g}"))
    console = PlainConsole()
    console.print(table_of(rows, title=f"{terms.count} steps, (epsilon, delta = {terms.delta:g})", **FACTS))
    console.print(_FOR_A_PERSON if unit == "person" else _FOR_A_LOOP)


def _possible(chosen: argparse.Namespace, setting: Setting) -> Possible:
    """The possible ways: secure aggregation if enough clients remain for shares of noise."""
    from privacy.forecast import Possible
    from secure_fed.config.settings import MOMENTUM

    cohort, everybody = (
        noise_shares(clients, chosen.corrupt, chosen.dropout) for clients in (setting.cohort, setting.clients)
    )
    momentum = MOMENTUM if chosen.momentum is None else chosen.momentum
    return Possible(cohort, everybody, momentum=momentum)


def noise_shares(clients: int, corrupt: float, dropout: float) -> int:
    """The number of honest clients' noise shares that a masked sum has at least; 0 if no masked sum of so many is possible."""

    if clients < FEWEST:
        return 0
    try:
        choose(clients, corrupt=corrupt, dropout=dropout, active=False)
    except ParameterError:
        return 0
    return counted_shares(clients, corrupt, dropout)


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
    from secure_fed.commands import budget_methods

    return list(budget_methods.spaces(chosen.model, chosen.pooling, setting, target, possible, say, chosen.task))


def _show_ways(console: PlainConsole, setting: Setting, ways: list[Way], chosen: argparse.Namespace) -> None:
    """The table, and the settings of the recommended way."""
    console.print(_ways_table(setting, ways))
    console.print(_ABOUT_WAYS if setting.dim is None else f"{_ABOUT_WAYS} {_LENGTH}")
    if bands := [way.band for way in ways if way.correlation == "banded"]:
        console.print(f"Correlated: central noise of which a part cancels over {bands[0]} rounds.")
    for sent in filter(None, (_sent_by_all(setting, way, chosen) for way in ways)):
        console.print(
            f"With Poisson sampling and distributed noise each of the {setting.clients:,} clients sends about {size(sent)} in "
            f"every round: {size(setting.clients * setting.rounds * sent)} in {setting.rounds} rounds, over all clients."
        )
    console.print("\nRecommended settings:\n")
    console.print(settings_of(setting, next(way for way in ways if way.recommended), chosen))


def _ways_table(setting: Setting, ways: list[Way]) -> Table:
    from rich.table import Column

    heads, numeric = ("", "sampling", "noise", "holds\nagainst"), ["noise\nmultiplier", "epsilon", "final\nnoise"]
    if setting.dim is not None:
        numeric.append("length")
    columns = [
        Column(head, no_wrap=True, justify="right" if head in numeric else "left") for head in (*heads, *numeric)
    ]
    rows = []
    for way in ways:
        numbers = [f"{way.noise_multiplier:.4g}", f"{way.epsilon:.3g}", f"{way.final_noise:.3g}"]
        share = way.share(setting)
        numbers += [] if share is None else [f"{share:.3f}"]
        mark, sampling = "->" if way.recommended else "", _SAMPLING.get(way.sampling, way.sampling)
        noise = _noise_in_words(way.noise, way.correlation)
        rows.append((mark, sampling, noise, _AGAINST[len(way.holds_against)], *numbers))
    return table_of(rows, *columns, title="Who is promised what", title_style="bold", **NARROW)


def _noise_in_words(noise: str, correlation: str) -> str:
    """The noise of a way: "central", "correlated", "distributed" or "local"."""
    return "correlated" if correlation == "banded" else noise


def settings_of(setting: Setting, way: Way, chosen: argparse.Namespace) -> str:
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
    sections = [  # numbers, booleans and plain words are the same in JSON and TOML
        "\n".join([f"[{section}]", *(f"{name} = {json.dumps(value)}" for name, value in keys.items())])
        for section, keys in tables.items()
    ]
    return "\n\n".join(sections) + "\n"


def _sent_by_all(setting: Setting, way: Way, chosen: argparse.Namespace) -> int | None:
    """The bytes that each client sends in every round, if all clients send: `dim` masked words, and keys and shares.

    None for ways in which only the cohort sends, and without `dim`.
    """
    if (way.sampling, way.noise) != ("coins", "distributed") or setting.dim is None:
        return None
    everybody = choose(setting.clients, corrupt=chosen.corrupt, dropout=chosen.dropout, active=False)
    graph = {name: getattr(everybody, name) for name in ("neighbours", "threshold", "survivors", "partners")}
    invited = tuple(range(setting.clients))
    parameters = Parameters("plan", 0, bytes(32), setting.dim, 32, invited, active=False, **graph)
    return sum(stage.up for stage in wire.traffic(parameters).values())


def show_methods(console: PlainConsole, model: str, rows: list[Space]) -> None:
    from rich.table import Column

    probed = any(row.noise_alone for row in rows)
    heads = ("numbers", "noise", "length", *(("loss", "hopeless\nbelow") if probed else ("longer\nbelow",)))
    columns = (Column(head, justify="left" if head == "noise" else "right") for head in heads)
    cells = []
    for row in rows:
        least = "any cohort" if row.longer_below is None else str(row.longer_below)
        harm = _harm(row.noise_alone) if probed else (least,)
        noise = _noise_in_words(row.noise, row.correlation)
        cells.append((row.method, f"{row.numbers:,}", noise, f"{row.length:.3f}", *harm))
    look = {"title": f"Methods on {model}", "title_style": "bold", **NARROW}
    console.print(table_of(cells, Column("method", no_wrap=True), *columns, **look))
    if first := next((row.noise_alone for row in rows if row.noise_alone), None):
        console.print(
            f"The loss before the noise is {first['start']:.3f}, and {first['chance']:.3f} is chance. {_PROBED}"
        )
    console.print(_ABOUT_METHODS if probed else f"{_ABOUT_METHODS} {_LONGER}")


def _harm(found: Mapping[str, Any] | None) -> tuple[str, str]:
    """Where the noise alone takes the loss, and the cohort below which that is hopeless; empty for a cohort that is not."""
    if found is None:
        return "-", "-"
    losses = [found["noised"], *([found["full"]] if found["shortened"] else [])]
    said = " / ".join("no number" if loss is None else f"{loss:.3g}" for loss in losses)
    enough = "any tried" if found["enough"] is None else f"{found['enough']:,}"
    return said, enough if found["hopeless"] else ""


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


def _plan_table(made: Forecast) -> Table:
    setting = made.setting
    unit = "one client replaced" if setting.sampling == "fixed" else "one client added or removed"
    seen = f"{made.epsilon_participants:.4g} against the other clients, who also see each cohort"
    rows = [
        ("noise multiplier", f"{made.noise_multiplier:g}"),
        ("epsilon", f"{made.epsilon:.4g} against whoever gets the model ({unit})"),
        ("epsilon_participants", seen),
        ("sampling rate", f"{setting.rate:.4g} ({setting.cohort} of {setting.clients}, {setting.sampling})"),
        ("noise on a mean", f"{made.noise_std:.4g} a coordinate (clip norm {setting.clip_norm:g})"),
    ]
    if made.noise_norm is not None:
        most = f"of a mean of at most {setting.clip_norm:g}"
        rows.append(("", f"{made.noise_norm:.4g} for all {setting.dim:,} together, {most}"))
    return table_of(rows, title=f"{setting.rounds} rounds, delta = {setting.delta:g}", **FACTS)


def _alternatives_table(setting: Setting, others: list[Forecast]) -> Table:
    from rich.table import Column

    whole = setting.dim is not None
    what = "length of the noise on a round's mean" if whole else "noise on a coordinate of a round's mean"
    columns = (Column(f"{cohort}", justify="right") for cohort in sorted({other.setting.cohort for other in others}))
    rows: dict[float, list[str]] = {target: [f"{target:g}"] for target in sorted({other.epsilon for other in others})}
    for one in others:
        rows[one.epsilon].append(f"{one.noise_multiplier:.3f}, {one.noise_norm if whole else one.noise_std:.3g}")
    return table_of(rows.values(), "epsilon", *columns, title=f"by cohort: noise multiplier, and {what}")


def _plan_facts(made: Forecast) -> dict[str, Any]:
    figures = asdict(made)
    beside = {name: getattr(made, name) for name in ("noise_std", "noise_norm", "outlook")}
    return {**figures.pop("setting"), "sampling_rate": made.setting.rate, **figures, **beside}
