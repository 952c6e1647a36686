"""Finished runs, each a line of a JSON Lines file; their tables, between two marks of a page; and pictures of pages."""

from __future__ import annotations

import fcntl
import io
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

Cell = TypeVar("Cell", bound=NamedTuple)
_SPELLED = "epsilon"  # written as text, since JSON has no infinity


def lines(out: Path) -> list[dict[str, Any]]:
    """Every run in the file; none if there is no file."""
    return [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()] if out.exists() else []


def keep(out: Path, run: dict[str, Any]) -> None:
    """Append one line; lines of two processes do not mix."""
    with out.open("a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(run) + "\n")


def fill(place: Path, tables: Mapping[str, str]) -> None:
    """Write each table between the marks of its name in a page; the rest of the page stays.

    Raises ValueError if the page lacks the marks of a table, and leaves it as it was.
    """
    page = place.read_text(encoding="utf-8")
    for name, table in tables.items():
        before, _, after = _around(place, page, name)
        page = f"{before}\n{table}\n{after}"
    place.write_text(page, encoding="utf-8")


def stale(docs: Path, script: Any) -> list[str]:
    """A sentence for each table in the folder `docs` that differs from the one made of the script's stored runs.

    script: a module with PAGE, the name of a page, and tables(), the page's tables by name.
    """
    page = (docs / script.PAGE).read_text(encoding="utf-8")
    return [
        f"{script.PAGE}: the table {name!r} is not what the stored runs give; `python benchmarks/{script.__name__}.py --docs "
        "docs` renews it"
        for name, table in script.tables().items()
        if _around(docs / script.PAGE, page, name)[1] != f"\n{table}\n"
    ]


def _around(place: Path, page: str, name: str) -> tuple[str, str, str]:
    """The page up to the first mark of that name, between the marks, and from the second on. place: for the error alone."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if not 0 <= page.find(begin) < page.find(end):
        raise ValueError(f"{place} has no marks {begin} and {end}, in this order")
    first, second = page.index(begin) + len(begin), page.index(end)
    return page[:first], page[first:second], page[second:]


def put_picture(place: Path, figure: Any) -> None:
    """Write matplotlib's figure as a PNG of 64 colours, a quarter of the size of an SVG."""
    from PIL import Image

    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=120)
    # Pillow's usual choice of colours, by median cut, gives the rare colours of two series one mean.
    Image.open(drawn).convert("RGB").quantize(64, Image.Quantize.FASTOCTREE).save(place, optimize=True)


def accuracies(kind: type[Cell], out: Path) -> dict[Cell, float]:
    """The accuracy of every run in the file, by the fields of `kind`. A field missing from a line has its default."""
    usual = kind._field_defaults
    return {
        kind(*(float(run[name]) if name == _SPELLED else (usual | run)[name] for name in kind._fields)): run["accuracy"]
        for run in lines(out)
    }


class Runs(Generic[Cell]):
    """The accuracy of runs: stored in a file, or made if the file lacks them.

    make: computes a cell's accuracy and the share of the commonest label. again: ignore the stored runs.
    """

    def __init__(
        self, kind: type[Cell], out: Path, make: Callable[[Cell], tuple[float, float]], *, again: bool
    ) -> None:
        self._kind, self._out, self._make, self._again = kind, out, make, again
        self._found: dict[Cell, float] = {}

    def __call__(self, cell: Cell) -> float:
        if cell not in self._found and not self._again:
            self._found |= accuracies(self._kind, self._out)  # another process may have made it
        if cell not in self._found:
            started = time.perf_counter()
            self._found[cell], commonest = self._make(cell)
            took = time.perf_counter() - started
            fields = {name: str(value) if name == _SPELLED else value for name, value in cell._asdict().items()}
            keep(self._out, fields | {"accuracy": self._found[cell], "seconds": took, "commonest": commonest})
            print(*cell, f"{100 * self._found[cell]:.1f}, {took:.0f} s", flush=True)
        return self._found[cell]
