"""The methods by name. To add one, write a file with a `CARD` and a `build`, or a row in `averaged.py`, and add its line here.

Importing this package imports no method and no torch; a method's file is imported on first use.

A method may also stay in a file of the user's own project, whose path is then its name: `method.name = "my_method.py"`
(`config.own_files`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

from secure_fed.config import MethodConfig, RunConfig, own_files
from secure_fed.errors import ConfigError

if TYPE_CHECKING:
    from secure_fed.methods.method import Card, Method

METHODS: dict[str, str] = {
    "fedft": "secure_fed.methods.averaged",
    "head": "secure_fed.methods.averaged",
    "bitfit": "secure_fed.methods.averaged",
    "adapter_houlsby": "secure_fed.methods.averaged",
    "adapter_pfeiffer": "secure_fed.methods.averaged",
    "prompt_tuning": "secure_fed.methods.averaged",
    "prefix_tuning": "secure_fed.methods.averaged",
    "p_tuning": "secure_fed.methods.averaged",
    "ia3": "secure_fed.methods.averaged",
    "compacter": "secure_fed.methods.averaged",
    "adamix": "secure_fed.methods.adamix",
    "fedlora": "secure_fed.methods.averaged",
    "ffa_lora": "secure_fed.methods.ffa_lora",
    "rolora": "secure_fed.methods.rolora",
    "fra_lora": "secure_fed.methods.fra_lora",
    "fra_then_ffa": "secure_fed.methods.fra_then_ffa",
    "federa": "secure_fed.methods.federa",
    "svd_adaptation": "secure_fed.methods.averaged",
    "fedara": "secure_fed.methods.fedara",
    "fedtt": "secure_fed.methods.fedtt",
    "fedtt_plus": "secure_fed.methods.fedtt_plus",
    "c2a": "secure_fed.methods.c2a",
    "fedsvd": "secure_fed.methods.fedsvd",
    "fedask": "secure_fed.methods.fedask",
    "fedpower": "secure_fed.methods.fedpower",
}

# Other names of a method; suggested where no method has the name.
_ELSEWHERE = {
    **dict.fromkeys(("lora", "fedit"), "fedlora"),
    **dict.fromkeys(("full", "fedavg", "fine_tuning"), "fedft"),
    **dict.fromkeys(("linear_probe", "linear_probing", "probe", "head_only"), "head"),
    "adapter": "adapter_houlsby",
    "prompt": "prompt_tuning",
    "prefix": "prefix_tuning",
    "ffa": "ffa_lora",
    "fra": "fra_lora",
}


def build(config: RunConfig | MethodConfig) -> Method:
    """The method of a run; an unknown name, or a setting that the method does not read, is refused.

    A `MethodConfig` alone stands for a run with defaults in all other sections.
    """
    run = RunConfig(method=config) if isinstance(config, MethodConfig) else config
    if run.method.name == "auto":
        run = import_module("secure_fed.methods.auto").decided(run)[0]
    chosen = card(run.method.name)
    _require_read(run.method, chosen)
    if chosen.memoryless and run.federation.optimizer != "mean":
        raise ConfigError(
            f"federation.server_optimizer = {run.federation.server_optimizer!r} cannot be used with method.name = "
            f"{chosen.name!r}: {chosen.memoryless}; use 'mean'"
        ).about("federation.server_optimizer", run.federation.server_optimizer, "mean")
    if chosen.needs_means and run.federation.aggregate != "mean":
        raise ConfigError(
            f"federation.aggregate = {run.federation.aggregate!r} cannot be used with method.name = {chosen.name!r}: "
            f"{chosen.needs_means}; use 'mean'"
        ).about("federation.aggregate", run.federation.aggregate, "mean")
    return _described(run.method.name)[1](run)


def _require_read(config: MethodConfig, chosen: Card) -> None:
    """Refuse a setting of [method] that has been changed and that this method does not read."""
    for option in sorted({option for other in cards() for option in other.options} - set(chosen.options)):
        if not config.left_alone(option):
            readers = [other.name for other in cards() if option in other.options]
            named = " and ".join(readers) if len(readers) < 4 else f"{', '.join(readers[:4])}, ..."
            raise ConfigError(
                f"method.{option} = {getattr(config, option)!r} has no effect with method.name = {config.name!r}: "
                f"leave it out, or use {named}, which read it"
            ).about(f"method.{option}", getattr(config, option), f"unset with method.name = {config.name!r}")


def require_known(name: str) -> None:
    """Refuse a name that no method has; whether a file is one shows when it is executed."""
    if name not in (*METHODS, "auto") and not own_files.is_file(name):
        plain = name.lower().replace("-", "_")
        near = [_ELSEWHERE[plain]] if plain in _ELSEWHERE else difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
        offer = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}"
        raise ConfigError(f"method.name = {name!r} is not a method: {offer}").about(
            "method.name", name, "a listed method"
        )


def card(name: str) -> Card:
    """The card of the method called `name`."""
    return _described(name)[0]


def cards() -> list[Card]:
    """Every method's card, in the order of the table."""
    return [card(name) for name in METHODS]


def _described(name: str) -> tuple[Card, Callable[[RunConfig], Method]]:
    """The card of a method and its `build`: a row of `averaged.TABLE`, which is its own card, else those of its file."""
    require_known(name)
    if not own_files.is_file(name):
        module = import_module(METHODS[name])
        row = getattr(module, "TABLE", {}).get(name)
        return (row, row.build) if row else (module.CARD, module.build)
    from secure_fed.methods.method import Card

    module = own_files.executed("method.name", name)
    found, make = getattr(module, "CARD", None), getattr(module, "build", None)
    if not isinstance(found, Card):
        why = "has no CARD: set CARD = Card(name, paper, ...), from secure_fed.methods.method"
    elif not callable(make):
        why = "has no function build(run) that returns a method"
    elif not found.name.isidentifier() or found.name in METHODS:
        why = f"names its method {found.name!r}: take a Python identifier that no listed method has"
    else:
        return found, make
    raise own_files.refused("method.name", name, why)
