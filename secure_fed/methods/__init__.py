"""The methods by name. To add one, write its file with a `CARD` and a `build`, and add its line here.

Importing this package imports no method and no torch; a method's file is imported when it is asked for.
"""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, cast

from secure_fed.config import MethodConfig
from secure_fed.errors import ConfigError

if TYPE_CHECKING:
    from secure_fed.methods.method import Card, Method

METHODS: dict[str, str] = {
    "fedlora": "secure_fed.methods.fedlora",
    "ffa_lora": "secure_fed.methods.ffa_lora",
    "fra_lora": "secure_fed.methods.fra_lora",
    "fra_then_ffa": "secure_fed.methods.fra_then_ffa",
}


def build(config: MethodConfig) -> Method:
    """The method that `config` names; a name that does not exist or a setting that it does not read is refused."""
    chosen = card(config.name)
    defaults = MethodConfig()
    for option in sorted({option for other in cards() for option in other.options} - set(chosen.options)):
        if getattr(config, option) != getattr(defaults, option):
            readers = " and ".join(other.name for other in cards() if option in other.options)
            raise ConfigError(
                f"method.{option} = {getattr(config, option)!r} has no effect with method.name = {config.name!r}: "
                f"leave it out, or use {readers}, which read it"
            )
    return cast("Method", import_module(METHODS[config.name]).build(config))


def card(name: str) -> Card:
    """What there is to say about the method called `name`."""
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
        offer = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}"
        raise ConfigError(f"method.name = {name!r} is not a method: {offer}")
    return cast("Card", import_module(METHODS[name]).CARD)


def cards() -> list[Card]:
    """Every method's card, in the order of the table."""
    return [card(name) for name in METHODS]
