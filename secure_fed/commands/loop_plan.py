"""`secure-fed budget plan --unit example`: noise and steps of a user's own training loop (`secure_fed.private`)."""

from __future__ import annotations

import argparse
import json
from typing import Any

from secure_fed.errors import ConfigError

# The options of each unit's plan, with their defaults.
OF_CLIENTS = {"rounds": None, "clients": None, "cohort": None, "dim": None, "model": None, "sampling": "poisson"}
OF_CLIENTS |= {"pooling": "model", "task": "classification", "momentum": None, "corrupt": 0.1, "dropout": 0.1}  # type: ignore[dict-item]
OF_LOOPS = {"examples": None, "batch_size": None, "epochs": None, "steps": None}
_NEEDED = {"client": ("rounds", "clients", "cohort"), "example": ("examples", "batch_size")}


def add_options_of_loops(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unit", choices=("client", "example"), default="client", help="protected unit: a federation's clients, or the "
        "examples in a training loop of your own (default: client)"
    )  # fmt: skip
    parser.add_argument("--examples", type=int, metavar="N", help="with --unit example: in the data set")
    parser.add_argument("--batch-size", type=int, metavar="B", help="with --unit example: expected")
    parser.add_argument("--epochs", type=int, metavar="E", help="with --unit example: epochs of ceil(N / B) steps")
    parser.add_argument("--steps", type=int, help="with --unit example: steps, instead of epochs")


def require_options(chosen: argparse.Namespace) -> None:
    """ConfigError if an option of the unit's plan is missing, or an option of the other unit's plan is set."""
    for name, default in (OF_LOOPS if chosen.unit == "client" else OF_CLIENTS).items():
        if (value := getattr(chosen, name)) != default:
            raise ConfigError(
                f"{_option(name)} is {value}, and has no effect with --unit {chosen.unit}; leave it out"
            ).about(_option(name), value, f"--unit {chosen.unit}")
    for name in _NEEDED[chosen.unit]:
        if getattr(chosen, name) is None:
            raise ConfigError(f"{_option(name)} is not given, and a plan with --unit {chosen.unit} needs it").about(
                _option(name), None, "a number"
            )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def plan(chosen: argparse.Namespace) -> None:
    """Print the noise of such a loop, or its cost."""
    from secure_fed.own_loop.allowance import Allowance
    from secure_fed.own_loop.terms import Terms

    terms = Terms(chosen.examples, chosen.batch_size, chosen.delta, chosen.epochs, chosen.steps)
    made = terms.plan(chosen.epsilon, chosen.noise_multiplier)
    clip_norm = 1.0 if chosen.clip_norm is None else chosen.clip_norm
    epsilon = made.epsilon() if chosen.epsilon is None else chosen.epsilon
    sensitivity = Allowance.of(terms, epsilon, clip_norm).sensitivity
    facts: dict[str, Any] = {
        "unit": "example",
        "noise_multiplier": made.noise_multiplier,
        "steps": terms.count,
        "steps_an_epoch": terms.epoch,
        "epsilon": made.epsilon(),
        "delta": terms.delta,
        "examples": terms.examples,
        "batch_size": terms.batch_size,
        "sampling_rate": terms.sampler.rate,
        "clip_norm": clip_norm,
        "sensitivity": sensitivity,
        "noise_std": made.noise_multiplier * sensitivity / terms.sampler.expected,
    }
    if chosen.json:
        print(json.dumps(facts))
    else:
        _show(facts)


def _show(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from secure_fed.report.terminal import PlainConsole

    table = Table(
        show_header=False, title=f"{facts['steps']} steps, (epsilon, delta = {facts['delta']:g})", title_style="bold"
    )
    table.add_row("noise multiplier", f"{facts['noise_multiplier']:g}")
    table.add_row("steps", f"{facts['steps']} ({facts['steps_an_epoch']} an epoch)")
    table.add_row("epsilon", f"{facts['epsilon']:.4g} against readers of the models (one example added or removed)")
    rate = f"{facts['sampling_rate']:.4g} ({facts['batch_size']} of {facts['examples']}, poisson)"
    table.add_row("sampling rate", rate)
    bound = f"clip norm {facts['clip_norm']:g}, sensitivity {facts['sensitivity']:.4g}"
    table.add_row("noise on a mean", f"{facts['noise_std']:.4g} a coordinate ({bound})")
    console = PlainConsole()
    console.print(table)
    console.print("For `secure_fed.private.wrap`, which computes the same noise from the same numbers.")
