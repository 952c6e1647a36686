"""Audits as audit.json holds them, for whatever reads one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from privacy import accounting
from tests.attacks import samples


@pytest.fixture(scope="module")
def coarse_accounting() -> Iterator[None]:
    """Epsilons of a coarse grid, which are larger and never smaller: for files that attack runs and do not test the epsilon."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(accounting.epsilon.__kwdefaults__, "discretization", accounting.COARSEST)
        patch.setattr(accounting, "FINE", accounting.COARSEST)
        yield


@pytest.fixture(scope="module")
def protected() -> dict[str, Any]:
    return samples.protected()


@pytest.fixture(scope="module")
def unprotected() -> dict[str, Any]:
    return samples.unprotected()
