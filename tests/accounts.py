"""A faster accountant on a coarser grid, for tests that do not check its digits.

`coarse` patches one function, so that every computation in one process uses the same grid. Its epsilon is still an upper bound,
slightly above that of the grid of record (`test_accounting.py` compares the two).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

# Tests that keep the grid of record: those that check epsilons, and those that start processes of their own.
EXACT = (
    *("tests/privacy/", "tests/test_", "test_adding_a_method.py", "test_cli.py"),
    *("test_bad_input.py", "test_command.py", "test_reliability.py"),
)


@contextmanager
def coarse() -> Iterator[None]:
    """A context in which no epsilon is computed on a grid finer than `accounting.COARSEST`."""
    from privacy import accounting

    of_record = accounting._epsilon

    def epsilon(release: accounting.Release, count: int, delta: float, discretization: float) -> float:
        return of_record(release, count, delta, max(discretization, accounting.COARSEST))

    with patch.object(accounting, "_epsilon", epsilon):
        yield
