"""The list of attacks: name, paper, and the weakest vantage point that can make each.

To add one, write attacks/NAME.py with a function run(case, settings) -> Finding, and add its line here. Your own attack can
stay in your own file, which `from_file` reads (`docs/adding_an_attack.md`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from importlib import import_module
from pathlib import Path
from traceback import extract_tb
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from secure_fed.config import own_files
from secure_fed.errors import ConfigError, SecureFedError

if TYPE_CHECKING:
    from attacks.adversary.case import Case, Finding, Settings

Run = Callable[["Case", "Settings"], "Finding"]


@dataclass(frozen=True)
class Attack:
    """name: its module. vantage: the weakest vantage point from which the attack works. again: stronger vantage points, from
    which it is repeated with more input. shadows: whether it trains reference adapters, each of which takes as long as the run.
    membership: whether it ranks units by how likely they are members. directions: whether it can rank canaries of random
    direction, which learn no examples. function: makes the attack; None: `run` of the module attacks.NAME.
    """

    name: str
    title: str
    paper: str
    vantage: str
    again: tuple[str, ...] = ()
    shadows: bool = False
    membership: bool = True
    directions: bool = False
    function: Run | None = None

    @property
    def module(self) -> str:
        return f"attacks.{self.name}"

    def run(self, case: Case, settings: Settings) -> Finding:
        return (self.function or cast("Run", import_module(self.module).run))(case, settings)


_LISTED = (
    Attack("loss", "Loss threshold", "Yeom et al. 2018", "outsider"),
    Attack("one_run", "One-run audit of canaries", "Steinke et al. 2023", "outsider", directions=True),
    Attack("lira", "Likelihood ratio, online", "Carlini et al. 2022", "outsider", shadows=True),
    Attack("lira_offline", "Likelihood ratio, offline", "Carlini et al. 2022", "outsider", shadows=True),
    Attack("rmia", "Robust membership inference", "Zarifzadeh et al. 2024", "outsider", shadows=True),
    Attack("round_losses", "Losses over the rounds", "Yeom et al. 2018", "fellow_client"),
    Attack("regression", "Steps explained by gradients", "this project", "fellow_client", again=("server",)),
    Attack(
        "canary_cosine",
        "Canaries of random direction",
        "Andrew et al. 2023",
        "fellow_client",
        again=("secure_server", "server"),
        directions=True,
    ),
    Attack("canary_likelihood", "Canary clients, by likelihood", "this project", "fellow_client", directions=True),
    Attack(
        "sum_inversion",
        "Texts out of the secure sum",
        "Petrov et al. 2024",
        "secure_server",
        again=("server",),
        membership=False,
    ),
    Attack("update_score", "Gradients against single updates", "Zhu et al. 2024", "server"),
    Attack("gradient_inversion", "Texts out of one update", "Petrov et al. 2024", "server", membership=False),
    Attack("label_counts", "Labels out of one update", "Wainakh et al. 2022", "server", membership=False),
)
ATTACKS = {one.name: one for one in _LISTED}


def attacks_named(names: Iterable[str]) -> list[Attack]:
    """The attacks with these names or file paths (`from_file`), each once; without names, all listed attacks."""
    found = {}
    for name in names or ATTACKS:
        if not name.endswith(".py") and name not in ATTACKS:
            raise ConfigError(
                f"--attack is {name!r}, but the attacks are {', '.join(ATTACKS)}, or the path of a .py file of yours",
                setting="--attack",
                value=name,
            )
        one = from_file(Path(name)) if name.endswith(".py") else ATTACKS[name]
        found[one.name] = one
    return list(found.values())


def from_file(file: Path) -> Attack:
    """The attack in a user's file: its `ATTACK`, made by its function `run(case, settings) -> Finding`.

    The file is executed. ConfigError, naming the file, if one of the two is missing or the attack cannot be listed.
    """
    from attacks.adversary.case import VANTAGES

    module = executed(file)
    attack, function = getattr(module, "ATTACK", None), getattr(module, "run", None)
    if not isinstance(attack, Attack):
        raise refused(file, "has no ATTACK: set ATTACK = Attack(name, title, paper, vantage), from attacks.catalogue")
    if not callable(function):
        raise refused(file, "has no function run(case, settings) that returns a Finding")
    if not attack.name.isidentifier() or attack.name in ATTACKS:
        raise refused(file, f"names its attack {attack.name!r}: take a Python identifier that no listed attack has")
    unknown = [name for name in (attack.vantage, *attack.again) if name not in VANTAGES]
    if unknown:
        raise refused(file, f"has the vantage point {unknown[0]!r}, but they are {', '.join(map(repr, VANTAGES))}")
    return replace(attack, function=_checked(file, guarded(file, function)))


def _checked(file: Path, function: Run) -> Run:
    """ConfigError if an attack returns something that a report cannot show, or changes data that other attacks read."""

    @wraps(function)
    def called(case: Case, settings: Settings) -> Finding:
        before = case.seen.digest
        finding = function(case, settings)
        if case.seen.digest != before:
            raise refused(
                file, "writes into tensors of case.seen, which other attacks read: work on a copy, tensor.clone()"
            )
        if why := _unusable(finding, len(case.units)):
            raise refused(file, f"returned {why}")
        return finding

    return called


def _unusable(finding: object, units: int) -> str:
    """The reason why a report cannot show what an attack returned; empty if it can."""
    import numpy as np

    from attacks.adversary.case import Finding

    if not isinstance(finding, Finding):
        return f"{type(finding).__name__}, and not a Finding"
    scores: object = finding.scores
    if scores is None and not finding.measured:
        return "a Finding without scores and without measured, so that there is nothing to show"
    if scores is not None and not isinstance(scores, np.ndarray):
        return f"scores that are {type(scores).__name__}: they are an array of {units} numbers, one a unit"
    if scores is not None and (scores.shape != (units,) or scores.dtype.kind not in "fiub"):
        return (
            f"scores that are {scores.dtype} of shape {scores.shape}: they are an array of {units} numbers, one a unit"
        )
    try:
        json.dumps(finding.measured)
    except (TypeError, ValueError) as error:
        return f"measured that is no JSON ({error}): give float(x) for numbers of numpy"
    return ""


def executed(file: Path) -> ModuleType:
    """The module in a file that the user names on the command line. ConfigError if it cannot be executed."""
    own_files.allow("--attack", str(file))
    return own_files.executed("--attack", str(file))


def guarded(file: Path, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function from a user's file. If it fails, a ConfigError names the line and the reason."""

    @wraps(function)
    def called(*given: Any) -> Any:
        try:
            return function(*given)
        except SecureFedError:
            raise
        except (Exception, SystemExit) as error:
            own = file.resolve()
            places = [one.lineno for one in extract_tb(error.__traceback__) if Path(one.filename).resolve() == own]
            where = f" at line {places[-1]}" if places else ""
            raise refused(file, f"failed{where} ({type(error).__name__}: {error})") from error

    return called


def refused(file: Path, why: str) -> ConfigError:
    """The error about a user's file."""
    return ConfigError(f"--attack {file} {why}", setting="--attack", value=str(file))
