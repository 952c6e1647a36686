"""Finished runs, each a line of a JSON Lines file; their tables, between two marks of a page; and pictures of pages."""

from __future__ import annotations

import fcntl
import io
import json
import time
from collections.abc import Callable
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


def put(place: Path, name: str, text: str) -> None:
    """Write the text between the marks of that name in a page; the rest of the page stays.

    Raises ValueError if the page has no such marks, and leaves it as it was.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    page = place.read_text(encoding="utf-8")
    if not 0 <= page.find(begin) < page.find(end):
        raise ValueError(f"{place} has no marks {begin} and {end}, in this order")
    before, rest = page.split(begin, 1)
    place.write_text(f"{before}{begin}\n{text}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")


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
