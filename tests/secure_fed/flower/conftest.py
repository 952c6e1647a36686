"""The task identity that Flower sets in its app processes, set here for tests without such processes."""

from __future__ import annotations

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def flower_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets a task identity, without which Flower creates no `Message`."""
    for name, value in {"_task_id": 11, "_run_id": 12, "_node_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
