"""`secure-fed`, with models whose every pass takes a given time longer: a program, for tests of what a person sees meanwhile.

python tests/slow_model.py SECONDS [ARGUMENT OF secure-fed ...]
"""

from __future__ import annotations

import sys
import time
from importlib.abc import Loader
from importlib.machinery import PathFinder
from types import ModuleType
from typing import Any

from secure_fed.commands import cli

MODULE = "transformers.models.bert.modeling_bert"


class Slowing(Loader):
    """Finds and loads the module of the model when it is first imported: an import here would be a silence of its own."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.inner: Any = None

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != MODULE or (spec := PathFinder.find_spec(name, path, target)) is None:
            return None
        self.inner, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        model: Any = module.BertModel  # type: ignore[attr-defined]
        forward, seconds = model.forward, self.seconds

        def slow(self: Any, *given: Any, **named: Any) -> Any:
            time.sleep(seconds)
            return forward(self, *given, **named)

        model.forward = slow


if __name__ == "__main__":
    sys.meta_path.insert(0, Slowing(float(sys.argv[1])))  # type: ignore[arg-type]
    sys.exit(cli.main(sys.argv[2:]))
