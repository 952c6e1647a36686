"""The planted faults fit the tree, and every one of them is caught."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import planted

PROGRAM = "def double(number: int) -> int:\n    return 2 * number\n\n\ndef half(number: int) -> int:\n    return number // 2\n"
TEST = "from thing.numbers import double\n\n\ndef test_double() -> None:\n    assert double(3) == 6\n"
FAULTS = """
[seen]
file = "thing/numbers.py"
text = "2 * number"
instead = "3 * number"
tests = ["tests/test_numbers.py"]

[unseen]
file = "thing/numbers.py"
text = "number // 2"
instead = "number // 3"
tests = ["tests/test_numbers.py"]

[stale]
file = "thing/numbers.py"
text = "number: int"
instead = "number: float"
tests = ["tests/test_numbers.py"]

[untested]
file = "thing/numbers.py"
text = "2 * number"
instead = "3 * number"
tests = ["tests/test_numbers.py::test_half"]

[red]
file = "thing/numbers.py"
text = "2 * number"
instead = "3 * number"
tests = ["tests/test_red.py"]
"""
RED = "def test_red() -> None:\n    assert 1 == 2\n"


def test_every_fault_fits_the_tree() -> None:
    for fault in planted.faults():
        before, after = fault.planted(planted.ROOT)
        assert before != after, fault.name
        compile(after, fault.file, "exec")
        for selected in fault.tests:
            file, _, name = selected.partition("::")
            assert name.rpartition("::")[2] in (planted.ROOT / file).read_text(encoding="utf-8"), (fault.name, selected)


def test_there_are_forty_faults_and_more_all_over_the_house() -> None:
    files = {fault.file for fault in planted.faults()}
    assert len(planted.faults()) >= 40
    assert {file.partition("/")[0] for file in files} == {"secure_fed", "privacy", "protocols", "attacks"}


@pytest.mark.nightly
def test_what_tests_do_not_see_is_missed_and_what_shows_nothing_is_an_error(tmp_path: Path) -> None:
    for name, text in {
        "pyproject.toml": '[tool.hatch.build.targets.wheel]\npackages = ["thing"]\n',
        "thing/__init__.py": "",
        "thing/numbers.py": PROGRAM,
        "tests/test_numbers.py": TEST,
        "tests/test_red.py": RED,
        "tests/planted.toml": FAULTS,
        "docs/page.md": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    program = (
        "import sys; from pathlib import Path; from tests import planted; sys.exit(planted.main((), Path(sys.argv[1])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=planted.ROOT, capture_output=True, text=True, check=False
    )
    found = dict(line.split(maxsplit=3)[::3] for line in done.stdout.splitlines() if " s  " in line)
    assert done.returncode == 1, done.stderr
    assert found["seen"] == "caught by tests/test_numbers.py::test_double"
    assert found["unseen"] == "missed"
    assert found["stale"].startswith("error: stale: its text is 2 times in thing/numbers.py")
    assert found["untested"].startswith("error: its tests do not pass without it")
    assert found["red"].startswith("error: its tests do not pass without it")
    assert (tmp_path / "thing/numbers.py").read_text(encoding="utf-8") == PROGRAM


@pytest.mark.nightly
def test_every_fault_is_caught_by_quick_tests() -> None:
    done = subprocess.run(
        [sys.executable, "tests/planted.py"], cwd=planted.ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
