"""A large data set of every task is read and tokenised in windows, through files, with the examples that it has in memory."""

from typing import Any

import pytest

from secure_fed.learning import problem
from secure_fed.learning.data import fingerprint, on_disk
from secure_fed.learning.data.encode import Encoded
from secure_fed.learning.data.on_disk import OnDisk
from tests.secure_fed.tasks.test_end_to_end import Configured, configured  # noqa: F401
from tests.secure_fed.tasks.toy_tasks import TOYS


def contents(made: problem.Problem) -> list[list[bytes]]:
    """The content of every example, of each client and of the test set, as a batch has it."""
    return [[fingerprint.content(own[index]) for index in range(len(own))] for own in (*made.train, made.test)]


@pytest.mark.parametrize("task", TOYS)
def test_examples_and_digests_do_not_depend_on_where_they_are(
    task: str,
    configured: Configured,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings: dict[str, Any] = {"privacy.unit": "example", "privacy.epsilon": 8.0}
    config = configured(task, **settings)
    memory = problem.configured(config)
    monkeypatch.setattr(on_disk, "LONG", 4)
    monkeypatch.setattr(problem, "WINDOW", 7)
    disk = problem.configured(config)
    for own in (*disk.train, disk.test):
        assert isinstance(own, Encoded)
        assert isinstance(own.input_ids, OnDisk)
    assert contents(disk) == contents(memory)
    assert (disk.data_digest, disk.unit_digest) == (memory.data_digest, memory.unit_digest)
    assert disk.facts == memory.facts
    assert disk.warning == memory.warning
    batch = disk.collate([disk.test[0], disk.test[3]])
    assert set(batch) == set(memory.collate([memory.test[0], memory.test[3]]))
