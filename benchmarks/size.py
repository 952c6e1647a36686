"""How large and how scattered the program is. `make lint` runs it, so that a change that scatters it shows.

    python benchmarks/size.py [--json]

    files     Python files of the four packages
    code      their lines without blank ones, comments, docstrings and imports
    imports   lines of imports, in percent of all lines
    single    files that one other file alone imports, which stands in the same folder
    once      private functions of at most four lines that are called at one place. Those that are passed as a value (a row of
              a table, a hook of a library) or decorated (cached, a property) are left out: they can't go into a caller

The exit status is 1 if a figure is above its limit. A change that lowers a figure lowers its limit here.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("secure_fed", "privacy", "protocols", "attacks")
LIMITS = {"files": 314, "code": 39_986, "imports": 7.1, "single": 30, "once": 37}
_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_SMALL = 4  # lines
Function = ast.FunctionDef | ast.AsyncFunctionDef


def span(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def without_docstring(node: Function | ast.ClassDef | ast.Module) -> list[ast.stmt]:
    return node.body[ast.get_docstring(node, clean=False) is not None :]


def name_of(node: ast.AST) -> str | None:
    """The name that an expression reads."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def is_small(node: ast.AST) -> bool:
    """Whether it is a private function of few lines, without decorators."""
    if not isinstance(node, Function) or not node.name.startswith("_") or node.name.startswith("__"):
        return False
    if node.decorator_list:
        return False
    body = without_docstring(node)
    return bool(body) and (body[-1].end_lineno or 0) - body[0].lineno < _SMALL


def code_and_imports(source: str, tree: ast.Module) -> tuple[int, int]:
    """The lines of code, and those of imports."""
    prose, imports = set[int](), set[int]()
    for node in ast.walk(tree):
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            for docstring in node.body[: len(node.body) - len(without_docstring(node))]:
                prose |= {*span(docstring)}
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports |= {*span(node)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    read = {line for one in tokens if one.type not in _NO_CODE for line in range(one.start[0], one.end[0] + 1)}
    return len(read - prose - imports), len(imports)


def imported(tree: ast.Module) -> Iterator[str]:
    """Dotted names; `from a import b` names a and a.b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def figures() -> dict[str, float]:
    trees = {
        path: ast.parse(path.read_text()) for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))
    }
    lines = code = imports = 0
    names, calls, small, importers = Counter[str](), Counter[str](), list[str](), defaultdict[str, set[Path]](set)
    for path, tree in trees.items():
        source = path.read_text()
        own = code_and_imports(source, tree)
        lines, code, imports = lines + source.count("\n"), code + own[0], imports + own[1]
        names.update(filter(None, map(name_of, ast.walk(tree))))
        calls.update(filter(None, (name_of(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call))))
        small += [node.name for node in ast.walk(tree) if isinstance(node, Function) and is_small(node)]
        for name in imported(tree):
            importers[name].add(path)
    by = {
        path: importers[".".join(path.relative_to(ROOT).with_suffix("").parts)]
        for path in trees
        if path.name != "__init__.py"
    }
    return {
        "files": len(trees),
        "code": code,
        "imports": round(100 * imports / lines, 1),
        "single": sum(len(some) == 1 and next(iter(some)).parent == path.parent for path, some in by.items()),
        "once": sum(names[name] == calls[name] == 1 for name in small),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    given, found = parser.parse_args(), figures()
    if given.json:
        print(json.dumps(found))
    else:
        print("  ".join(f"{name} {value} (at most {LIMITS[name]})" for name, value in found.items()))
    if above := [name for name, value in found.items() if value > LIMITS[name]]:
        sys.exit(f"above the limit: {', '.join(above)}. Put a subject into one file, or a helper into its caller")


if __name__ == "__main__":
    main()
