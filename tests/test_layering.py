"""Who may import whom, as one table.

An import counts wherever it stands: at the top of a file, inside a function, under `TYPE_CHECKING`, or as
`importlib.import_module("name")`. Only the first costs time at start-up, but each of them is knowledge of
the other side, so none is exempt.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("secure_fed", "privacy", "protocols", "attacks")
OUTSIDE = ("tests", "benchmarks", "examples", "docs")


@dataclass(frozen=True)
class Rule:
    """`who` (modules and what is below them, less `except_for`) imports nothing in `never` or off `only`."""

    who: tuple[str, ...]
    why: str
    never: tuple[str, ...] = ()
    only: tuple[str, ...] | None = None
    except_for: tuple[str, ...] = ()

    def binds(self, module: str) -> bool:
        return is_below(module, self.who) and not is_below(module, self.except_for)

    def forbids(self, imported: str) -> bool:
        return is_below(imported, self.never) or (self.only is not None and not is_below(imported, self.only))


RULES = {
    "privacy": Rule(
        who=("privacy",),
        never=("secure_fed", "protocols", "attacks", "transformers", "peft", "datasets"),
        why="differential privacy knows nothing of models, methods or masks",
    ),
    "protocols": Rule(
        who=("protocols",),
        only=("protocols", "numpy", "cryptography", *sys.stdlib_module_names),
        why="secure aggregation is usable on its own and starts without torch",
    ),
    "rig": Rule(
        who=PACKAGES,
        except_for=("protocols.rig", "secure_fed.commands.secagg"),
        never=("protocols.rig",),
        why="the rig lies and reads private state: it is no part of the protocol, and one command plays it",
    ),
    "methods": Rule(
        who=("secure_fed.tensors", "secure_fed.methods", "secure_fed.learning.models.adapters"),
        never=("privacy", "protocols"),
        why="a method sees only means, whatever made them private",
    ),
    "attacks": Rule(
        who=("attacks",),
        never=("protocols",),
        why="an attack reads what a vantage point saw, never the protocol's insides",
    ),
    "attacked": Rule(
        who=PACKAGES,
        except_for=("attacks", "secure_fed.commands.cli"),
        never=("attacks",),
        why="the engine has no hooks for attacks; only the command line starts them",
    ),
    "flower": Rule(
        who=PACKAGES,
        except_for=("secure_fed.flower",),
        never=("flwr",),
        why="one transport knows Flower",
    ),
    "outside": Rule(
        who=PACKAGES,
        never=OUTSIDE,
        why="what is not in the wheel cannot be imported from it",
    ),
}


def is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether `name` is one of the dotted `prefixes` or lies inside one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def imports(module: str, source: str, *, is_package: bool = False) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything `source`, the file of `module`, imports.

    `from a import b` yields `a.b`: where `b` is a module it is what a rule may name, where it is an
    attribute it still lies below `a`.
    """
    home = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                parents = home[: len(home) - level + 1] if level else []
                start = ".".join([*parents, *([base] if base else [])])
                yield from ((node.lineno, f"{start}.{alias.name}") for alias in names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """One sentence for each import in `source` that a rule forbids to `module`."""
    return [
        f"{module}, line {line}, imports {imported} (rule {name!r}: {rule.why})"
        for line, imported in imports(module, source, is_package=is_package)
        for name, rule in RULES.items()
        if rule.binds(module) and rule.forbids(imported)
    ]


def source_files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_every_package_is_looked_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in source_files()} == set(PACKAGES)


def test_the_packages_keep_the_rules() -> None:
    found = [
        violation
        for path in source_files()
        for violation in violations(
            module_name(path), path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py"
        )
    ]
    assert found == []


PLANTED = [
    ("privacy", "privacy.mechanisms", "from secure_fed.tensors.tensors import Tensors"),
    ("privacy", "privacy.sampling", "import transformers"),
    ("privacy", "privacy", "import protocols.codec as codec"),
    ("protocols", "protocols.codec", "import torch"),
    ("protocols", "protocols.server", "def total():\n    from privacy import sampling"),
    ("protocols", "protocols.keys", "import secure_fed"),
    ("rig", "protocols.client", "from protocols.rig.scene import Scene"),
    ("rig", "secure_fed.rounds.masked.masked_sum", "def play():\n    from protocols.rig import simulate"),
    ("methods", "secure_fed.methods.ffa_lora", "import privacy.mechanisms"),
    ("methods", "secure_fed.tensors.tensors", "from protocols import codec"),
    (
        "methods",
        "secure_fed.learning.models.adapters.lora",
        "if TYPE_CHECKING:\n    import privacy.mechanisms",
    ),
    ("attacks", "attacks.scores", "from protocols.rig.simulate import simulate"),
    ("attacked", "secure_fed.rounds.engine", "import attacks"),
    ("attacked", "secure_fed.rounds.engine", "import_module('attacks.scores')"),
    ("attacked", "secure_fed.report.page", "importlib.import_module('attacks')"),
    ("attacked", "secure_fed.commands.cli_parser", "from attacks import report"),
    ("flower", "secure_fed.rounds.transport", "from flwr.common import Parameters"),
    ("outside", "secure_fed.learning.data.notes", "from tests.secure_fed import examples"),
    ("outside", "attacks.report", "import benchmarks.peers"),
]


@pytest.mark.parametrize(("rule", "module", "source"), PLANTED)
def test_a_planted_violation_is_caught(rule: str, module: str, source: str) -> None:
    assert any(f"rule {rule!r}" in violation for violation in violations(module, source))


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("privacy.mechanisms", "import math\nimport numpy as np\nfrom privacy.sampling import poisson"),
        ("protocols.keys", "from __future__ import annotations\nfrom cryptography.hazmat import primitives"),
        ("protocols.client", "from . import keys\nfrom .messages import Share"),
        ("secure_fed.rounds.server", "from privacy.mechanisms import NoMechanism\nimport protocols.server"),
        ("secure_fed.methods.fedlora", "from secure_fed.tensors.tensors import Tensors\nimport torch"),
        ("secure_fed.commands.cli", "from attacks import report"),
        ("secure_fed.flower", "import flwr"),
        ("attacks.vantage", "from secure_fed.rounds.transport import Recording\nimport privacy.accounting"),
        ("secure_fed.rounds.engine", "import privacy_preserving_library"),
    ],
)
def test_an_allowed_import_is_not_reported(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "is_package", "source", "expected"),
    [
        ("secure_fed.learning.data.rows", False, "from . import files", "secure_fed.learning.data.files"),
        ("secure_fed.learning.data.rows", False, "from ..tasks import build", "secure_fed.learning.tasks.build"),
        ("secure_fed.learning.data", True, "from .rows import Rows", "secure_fed.learning.data.rows.Rows"),
        ("secure_fed.learning.data", True, "from .. import tasks", "secure_fed.learning.tasks"),
    ],
)
def test_relative_imports_are_resolved(module: str, is_package: bool, source: str, expected: str) -> None:
    assert [name for _, name in imports(module, source, is_package=is_package)] == [expected]
