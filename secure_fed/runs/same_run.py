"""Whether a directory contains this very run: the same settings, on the same data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from privacy.statement import PROSE
from secure_fed.config import RunConfig
from secure_fed.config.checks import EFFECTS
from secure_fed.errors import RunDirectoryError
from secure_fed.learning.data import fingerprint
from secure_fed.methods import card
from secure_fed.runs.directory import OWN_FACTS, PRIVATE, private_part, read_object

Record = Mapping[str, Any]


def require_same(path: Path, config: RunConfig, held: RunConfig) -> None:
    rounds = ("federation", "rounds")
    if config.federation.rounds < held.federation.rounds:
        raise RunDirectoryError(
            f"{path} was planned for {held.federation.rounds} rounds; federation.rounds may be raised on resuming, "
            f"not lowered to {config.federation.rounds}"
        )
    if config.federation.rounds > held.federation.rounds and held.privacy.unit != "none":
        raise RunDirectoryError(
            f"{path} was planned for {held.federation.rounds} rounds, and its privacy too: federation.rounds cannot be raised "
            "after a release; start a new run"
        )
    unread = _left_unread(config, held)
    differences = config.replace({rounds: held.federation.rounds, **unread}).differences(held)
    if differences:
        raise RunDirectoryError(
            f"{path} was started with another configuration (now, and then): {'; '.join(differences)}; resume without that "
            "change"
        )


def _left_unread(config: RunConfig, held: RunConfig) -> dict[tuple[str, str], Any]:
    """The recorded values of settings that have no effect here, that an earlier version left open, or that the method does not
    read and nobody set: an earlier version wrote its own defaults there.
    """
    one, other = config.method, held.method
    options = (field.name for field in fields(one) if field.name not in ("name", *card(one.name).options))
    alone = [option for option in options if one.left_alone(option) and other.left_alone(option)]
    alone += [option for option in _ONCE_OPEN if getattr(other, option) is None]
    idle = [name.split(".") for name, effective, _ in EFFECTS if not effective(config) and not effective(held)]
    return {
        (section, name): getattr(getattr(held, section), name)
        for section, name in [*(("method", option) for option in alone), *idle]
    }


def require_same_data(name: str, path: Path, differing: Sequence[str]) -> None:
    if differing:
        if differing[0] == "privacy":
            raise RunDirectoryError(
                f"{path} was started with another guarantee: privacy in {name} differs; resume without that change"
            )
        if differing[0] == "chat_template":
            raise RunDirectoryError(
                f"{path} was started with another chat template: chat_template in {name} differs; resume with that one, "
                "which is the tokenizer's of model.name, or that of data.chat_template"
            )
        if differing[0] == "local":
            raise RunDirectoryError(
                f"{path} was started with another local step: local in {name} differs; resume with the same function, or "
                "without one if the run had none"
            )
        raise RunDirectoryError(
            f"{path} was started with other data: {differing[0]} in {name} differs; resume with the training and test rows of "
            "that run and the same division, or start a new run"
        )


def differing(facts: Record, held: Record) -> list[str]:
    """The names of facts that differ from the recorded ones. Versions may change, and with them the words of a guarantee."""
    return [
        name
        for name, value in facts.items()
        if name != "versions"
        and not (name in _ADDED and name not in held)
        and not _same(_without_prose(name, value), _without_prose(name, held.get(name)))
    ]


def differing_digests(path: Path, own: Record) -> list[str]:
    """The names of facts that differ from the private part of the run in `path`; digests are keyed with its key."""
    if not (private_part(path) / OWN_FACTS).exists():
        raise RunDirectoryError(
            f"{path / PRIVATE} lacks {OWN_FACTS}, which identifies the run's data: restore the folder that the run wrote"
        )
    held = read_object(private_part(path), OWN_FACTS)
    return differing(sealed(own, str(held.get("key", ""))), held)


def sealed(own: Record, key: str) -> dict[str, Any]:
    """The same facts with keyed digests: without the key, nobody can test a guess on them."""
    return {
        name: sealed(value, key)
        if isinstance(value, Mapping)
        else fingerprint.sealed(value, key)
        if name in _DIGESTS and isinstance(value, str)
        else value
        for name, value in own.items()
    }


def _without_prose(name: str, fact: Any) -> Any:
    if name != "privacy" or not isinstance(fact, Mapping):
        return fact
    return {key: value for key, value in fact.items() if key not in PROSE}


def _same(one: Any, other: Any) -> bool:
    return json.dumps(one) == json.dumps(other)


_ONCE_OPEN = ("warmup_rounds", "final_rounds")  # an earlier version did not record FedARA's choice of them
_DIGESTS = ("data_digest", "examples_digest", "digest")
_ADDED = ("examples_digest", "noise_alone")  # facts that runs of an earlier version lack
