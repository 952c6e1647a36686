"""The methods by name. To add one, write a file with a `CARD` and a `build`, or a row in `averaged.py`, and add its line here.

Importing this package imports no method and no torch; a method's file is imported on first use.

A method may also stay in a file of the user's own project, whose path is then its name: `method.name = "my_method.py"`. A run
notes the path with a digest of the content (`pinned`), so that an edited file does not resume it. Such a file is executed only
where the user of this process named it (`require_known`, `pinned`), and not because a charter or an exported folder names it.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from secure_fed.config import MethodConfig, RunConfig
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
    """Refuse a name that no method has, and a file that is not there or has another content than the name says."""
    if file := _OWN_FILE.fullmatch(name):
        path = Path(file["path"]).expanduser().absolute()
        if not path.is_file():
            raise _refused(name, "is no file: give the path of a .py file, or the name of a listed method")
        if file["digest"] not in (None, _digest(path.read_bytes())):
            raise _refused(name, "has another content now than the run began with: restore it, or start a new run")
        _named.add(path)
    elif name not in METHODS:
        plain = name.lower().replace("-", "_")
        near = [_ELSEWHERE[plain]] if plain in _ELSEWHERE else difflib.get_close_matches(name, METHODS, n=1, cutoff=0.4)
        offer = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(METHODS)}"
        raise _refused(name, f"is not a method: {offer}")


def pinned(run: RunConfig) -> RunConfig:
    """The configuration, in which the name of a method's own file is its absolute path with its digest.

    A name with a digest is a run's note, not a user's word: by itself it allows this process to execute no file.
    """
    if not (file := _OWN_FILE.fullmatch(run.method.name)):
        return run
    path = Path(file["path"]).expanduser().absolute()
    if file["digest"] and path not in _named:
        return run
    require_known(run.method.name)
    return run.replace({("method", "name"): f"{path}@{_digest(path.read_bytes())}"})


def card(name: str) -> Card:
    """The card of the method called `name`."""
    return _described(name)[0]


def cards() -> list[Card]:
    """Every method's card, in the order of the table."""
    return [card(name) for name in METHODS]


def _described(name: str) -> tuple[Card, Callable[[RunConfig], Method]]:
    """The card of a method and its `build`: a row's in `averaged.TABLE`, else those of its file."""
    if file := _OWN_FILE.fullmatch(name):
        path = Path(file["path"]).expanduser().absolute()
        if path not in _named:
            raise _refused(
                name,
                "is a file of a user's own: it is executed only where a configuration of yours names it; if you trust it, "
                "call secure_fed.methods.require_known with its path first",
            )
        module = _executed(path, name, file["digest"])
    else:
        require_known(name)
        module = import_module(METHODS[name])
    if row := getattr(module, "TABLE", {}).get(name):
        return row.card, row.build
    return module.CARD, module.build


_OWN_FILE = re.compile(r"(?P<path>.+\.py)(?:@(?P<digest>[0-9a-f]{16}))?")
_named: set[Path] = set()  # the files that the user of this process named


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()[:16]


def _executed(path: Path, named: str, digest: str | None) -> ModuleType:
    """The module in a user's file, executed once a process for each content. ConfigError if it is no method."""
    if done := sys.modules.get(f"method_of_{path.stem}_{digest}"):  # a run goes on with what it began with
        return done
    from secure_fed.methods.method import Card

    require_known(named)
    content = path.read_bytes()
    name = f"method_of_{path.stem}_{_digest(content)}"
    if name in sys.modules:
        return sys.modules[name]
    module = sys.modules[name] = ModuleType(name)  # among the modules, where dataclasses look their annotations up
    module.__file__ = str(path)
    try:
        exec(compile(content, str(path), "exec"), module.__dict__)
        found = getattr(module, "CARD", None)
        if not isinstance(found, Card):
            raise _refused(str(path), "has no CARD: set CARD = Card(name, paper, ...), from secure_fed.methods.method")
        if not callable(getattr(module, "build", None)):
            raise _refused(str(path), "has no function build(run) that returns a method")
        if not found.name.isidentifier() or found.name in METHODS:
            raise _refused(
                str(path), f"names its method {found.name!r}: take a Python identifier that no listed method has"
            )
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, ConfigError):
            raise
        raise _refused(str(path), f"cannot be executed ({type(error).__name__}: {error})") from error
    return module


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"method.name = {name!r} {why}").about("method.name", name, "a listed method or a file of one")
