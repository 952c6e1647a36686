"""What Flower sets in the processes of its apps, and tests of them set themselves."""

from __future__ import annotations

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def flower_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages can be made only within a task."""
    for name, value in {"_task_id": 11, "_run_id": 12, "_node_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
