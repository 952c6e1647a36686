"""Audits as audit.json holds them, for whatever reads one."""

from __future__ import annotations

from typing import Any

import pytest

from tests.attacks import samples


@pytest.fixture(scope="module")
def protected() -> dict[str, Any]:
    return samples.protected()


@pytest.fixture(scope="module")
def unprotected() -> dict[str, Any]:
    return samples.unprotected()
