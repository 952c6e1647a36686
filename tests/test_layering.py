"""Who may import whom, as two tables: rules between packages, and the floors of the rooms inside a package.

An import counts wherever it stands: at the top of a file, inside a function, under `TYPE_CHECKING`, or as
`importlib.import_module("name")`. Only the first costs time at start-up, but each of them makes one side depend on the other,
so none is exempt.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from attacks.catalogue import ATTACKS
from tests.cells import every

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
        except_for=("protocols.scene", "protocols.lies", "protocols.simulate", "secure_fed.commands.secagg"),
        never=("protocols.scene", "protocols.lies", "protocols.simulate"),
        why="the rig lies and reads private state: it is no part of the protocol, and one command plays it",
    ),
    "one process": Rule(
        who=PACKAGES,
        except_for=("protocols.workers", "secure_fed.rounds.masked.wiring"),
        never=("protocols.workers",),
        why="only a simulation, which holds the secrets of all clients, may compute a pair's keys once for both ends",
    ),
    "methods": Rule(
        who=("secure_fed.tensors", "secure_fed.methods", "secure_fed.learning.models.adapters"),
        except_for=("secure_fed.tensors.low_rank",),  # takes privacy.denoise: a function of released values
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

# The rooms of a package, a floor a line, the lowest first. A room imports itself and the floors below, nothing on its own floor
# or above. A string is a room: one module or folder, or several with a space between. A module lies in the room with the
# longest matching name. A package that is missing here has no floors yet.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "secure_fed": (
        ("activity", "errors"),
        ("config", "tensors"),
        ("learning.data",),
        ("learning.tasks",),
        ("learning.models",),
        ("learning.generation",),
        ("learning.training",),
        ("learning.training.common_passes",),
        ("learning.read_once",),
        ("learning.evaluation",),
        ("learning.problem",),
        ("learning.user_objects",),
        ("learning.audit_pool",),
        ("methods",),
        (
            "rounds.client_models",
            "rounds.cohort",
            "rounds.diagnostics",
            "rounds.local_function",
            "rounds.placement",
            "rounds.server_optimizer",
            "rounds.transport",
        ),
        ("rounds.open_settings", "rounds.request_checks", "rounds.sums"),
        ("rounds.protection",),
        ("rounds.client", "rounds.server"),
        ("rounds.engine", "rounds.noise_alone", "rounds.dummies"),
        ("rounds.masked",),
        ("runs.durable", "runs.published", "runs.roc"),
        ("runs.assembly", "runs.directory"),
        ("runs.budget", "runs.evaluation", "runs.membership", "runs.noise_key", "runs.recording", "runs.store"),
        ("runs.guarantee",),
        ("runs.dry_run", "runs.hopeless", "runs.result"),
        ("runs.run",),
        ("export", "own_loop", "report"),
        ("federation", "deployment", "private"),
        ("flower",),
        ("commands __main__",),
    ),
    "privacy": (
        ("errors",),
        ("denoise", "entropy", "filters", "ledger_file", "statement"),
        ("accounting", "book"),
        ("ledger", "mechanisms", "participation"),
        ("correlation", "distributed"),
        ("plan",),
        ("composition", "forecast"),
    ),
    "protocols": (
        ("errors",),
        ("keys", "graph", "record", "thresholds"),
        ("masking", "parameters", "sharing"),
        ("wire",),
        ("roster",),
        ("client", "server"),
        ("workers",),
        ("scene",),
        ("lies",),
        ("simulate",),
    ),
    "attacks": (
        ("record",),
        ("adversary",),
        ("catalogue", "options"),
        ("evidence",),
        ("texts",),
        (" ".join(ATTACKS),),
        ("report",),
        ("report.page",),
        ("audit", "any_model"),
        ("extraction", "inference", "lying"),
        ("prepared",),
        ("command",),
        ("cli",),
    ),
}
# An import upwards that is allowed, and why. It may still make no circle.
UPWARDS = {
    ("attacks", " ".join(ATTACKS), "command"): "an attack's file, run as a script, calls command.main",
}


def is_below(name: str, prefixes: tuple[str, ...]) -> bool:
    """Whether `name` is one of the dotted `prefixes` or lies inside one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


@cache
def imports(module: str, source: str, *, is_package: bool = False) -> tuple[tuple[int, str], ...]:
    """Line and absolute dotted name of everything `source`, the file of `module`, imports.

    `from a import b` yields `a.b`: where `b` is a module it is what a rule may name, where it is an
    attribute it still lies below `a`.
    """
    return tuple(_imports(module, source, is_package=is_package))


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements below the node; expressions, which are most of a tree, are not entered."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


def _imports(module: str, source: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    home = module.split(".") if is_package else module.split(".")[:-1]
    calls = "import_module" in source or "__import__" in source
    for node in (ast.walk if calls else statements)(ast.parse(source)):
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


def room_of(module: str) -> str | None:
    """The room of `module` in FLOORS, None where its package has no floors or none of its rooms holds it."""
    package, _, inside = module.partition(".")
    rooms = [room for floor in FLOORS.get(package, ()) for room in floor]
    matching = [(len(name), room) for room in rooms for name in room.split() if is_below(inside, (name,))]
    return max(matching)[1] if matching else None


def floor_violations(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """One sentence for each import in `source` of a room that does not lie below that of `module`."""
    package, room = module.partition(".")[0], room_of(module)
    floors = {one: height for height, floor in enumerate(FLOORS.get(package, ())) for one in floor}
    found = []
    for line, imported in imports(module, source, is_package=is_package):
        other = room_of(imported) if is_below(imported, (package,)) else None
        if room is None or other is None or other == room or (package, room, other) in UPWARDS:
            continue
        if floors[other] >= floors[room]:
            found.append(f"{module}, line {line}, imports {imported}, and room {other!r} is not below {room!r}")
    return found


def arrows(sources: Mapping[str, tuple[str, bool]]) -> dict[str, set[str]]:
    """For each module of `sources` (its text, and whether it is a package) the others of them that it imports.

    A name imported from a module counts as that module. The package around an imported module does not count.
    """

    def owner(name: str) -> str:
        while name and name not in sources:
            name = name.rpartition(".")[0]
        return name

    return {
        module: {owner(name) for _, name in imports(module, text, is_package=is_package)} - {"", module}
        for module, (text, is_package) in sources.items()
    }


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """The modules or rooms of one circle in order, the first again at the end; [] where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])[::-1]
    return []


def among_rooms(graph: Mapping[str, Iterable[str]]) -> dict[str, set[str]]:
    """The arrows of `graph` between rooms. Where a package has no floors, a folder is a room and so is a file at the root."""

    def named(module: str) -> str:
        package, room = module.partition(".")[0], room_of(module)
        return f"{package}: {room}" if room else ".".join(module.split(".")[:2])

    rooms: dict[str, set[str]] = {named(module): set() for module in graph}
    for module, imported in graph.items():
        rooms[named(module)] |= {named(one) for one in imported} - {named(module)}
    return rooms


@cache
def every_source() -> dict[str, tuple[str, bool]]:
    return {
        module_name(path): (path.read_text(encoding="utf-8"), path.name == "__init__.py") for path in source_files()
    }


@cache
def of_tree() -> dict[str, set[str]]:
    return arrows(every_source())


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
        for module, (text, is_package) in every_source().items()
        for violation in violations(module, text, is_package=is_package)
    ]
    assert found == []
    assert violations("secure_fed.rounds.engine", "import attacks_elsewhere") == [], (
        "a name that only begins like a package's"
    )


PLANTED = [
    ("privacy", "privacy.mechanisms", "from secure_fed.tensors.tensors import Tensors"),
    ("privacy", "privacy.participation", "import transformers"),
    ("protocols", "protocols.masking", "import torch"),
    ("protocols", "protocols.server", "def total():\n    from privacy import participation"),
    ("rig", "protocols.client", "from protocols.scene import Scene"),
    ("rig", "secure_fed.rounds.masked.server", "def play():\n    from protocols import simulate"),
    ("one process", "protocols.server", "from protocols.workers import Workers"),
    ("one process", "secure_fed.rounds.masked.client", "def new():\n    from protocols import workers"),
    ("methods", "secure_fed.methods.ffa_lora", "import privacy.mechanisms"),
    (
        "methods",
        "secure_fed.learning.models.adapters.lora",
        "if TYPE_CHECKING:\n    import privacy.mechanisms",
    ),
    ("attacks", "attacks.scores", "from protocols.simulate import simulate"),
    ("attacked", "secure_fed.rounds.engine", "import_module('attacks.scores')"),
    ("attacked", "secure_fed.report.page", "importlib.import_module('attacks')"),
    ("flower", "secure_fed.rounds.transport", "from flwr.common import Parameters"),
    ("outside", "secure_fed.learning.data.notes", "from tests.secure_fed import examples"),
]


@every(("rule", "module", "source"), PLANTED)
def test_a_planted_violation_is_caught(rule: str, module: str, source: str) -> None:
    assert any(f"rule {rule!r}" in violation for violation in violations(module, source))


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, _, _ in PLANTED} == set(RULES)


@every(
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


def test_every_module_of_a_package_with_floors_has_a_room() -> None:
    homeless = {one for one in every_source() if one.partition(".")[0] in FLOORS and room_of(one) is None}
    folders = {
        module for module, (text, is_package) in every_source().items() if is_package and not imports(module, text)
    }
    assert (
        sorted(homeless - folders - {"secure_fed", "protocols"}) == []
    )  # a package's public names are above its rooms


def test_every_room_has_a_module_and_stands_on_one_floor() -> None:
    rooms = [(package, room) for package, floors in FLOORS.items() for floor in floors for room in floor]
    assert len(rooms) == len(set(rooms))
    assert {*rooms} == {(one.partition(".")[0], room_of(one)) for one in every_source()} - {
        (package, None) for package in PACKAGES
    }


def test_a_room_imports_only_rooms_below_it() -> None:
    found = [
        violation
        for module, (text, is_package) in every_source().items()
        for violation in floor_violations(module, text, is_package=is_package)
    ]
    assert found == []


def test_there_is_no_circle_among_files() -> None:
    assert circle(of_tree()) == []


def test_there_is_no_circle_among_rooms() -> None:
    assert circle(among_rooms(of_tree())) == []


@every(
    ("module", "source"),
    [
        ("attacks.adversary.case", "from attacks.evidence.figures import judged"),
        ("attacks.evidence.figures", "def f():\n    from attacks.texts import span"),
        ("attacks.evidence.verdict", "import attacks.report.page"),
        ("privacy.accounting", "if TYPE_CHECKING:\n    from privacy.mechanisms import Mechanism"),
        ("protocols.graph", "from .wire import Roster"),
        ("protocols.scene", "from protocols.lies import ATTACKS"),
        ("secure_fed.learning.data.sources", "from secure_fed.learning import tasks"),
        ("secure_fed.runs.result", "if TYPE_CHECKING:\n    from secure_fed.federation import Federation"),
    ],
)
def test_a_planted_import_of_a_room_that_is_not_below_is_caught(module: str, source: str) -> None:
    assert floor_violations(module, source) != []


@every(
    ("planted", "into"),
    [
        ("from attacks.audit import audited", "attacks.adversary.case"),
        ("from protocols.client import Client", "protocols.wire"),
        ("if TYPE_CHECKING:\n    from secure_fed.federation import Federation", "secure_fed.runs.guarantee"),
    ],
)
def test_a_planted_circle_among_files_is_caught(planted: str, into: str) -> None:
    sources = every_source()
    text, is_package = sources[into]
    assert into in circle(arrows(sources | {into: (f"{text}\n{planted}\n", is_package)}))


def test_a_planted_circle_among_rooms_is_caught() -> None:
    """The planted import closes a circle among rooms, and none among files."""
    graph = {**of_tree(), "attacks.adversary.null": of_tree()["attacks.adversary.null"] | {"attacks.evidence.attempts"}}
    assert circle(graph) == []
    assert {"attacks: adversary", "attacks: evidence"} <= set(circle(among_rooms(graph)))
