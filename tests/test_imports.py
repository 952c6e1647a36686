"""Importing the packages and asking for help stays cheap: nothing that takes seconds to load is loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = (
    *("torch", "transformers", "peft", "datasets", "matplotlib", "pandas", "pyarrow", "scipy", "sklearn"),
    *("dp_accounting", "opacus"),
)

# Runs what is in argv[1] and prints, as the last line, which of the modules in argv[2:] that has loaded.
PROBE = """
import json, sys
statement, names = sys.argv[1], sys.argv[2:]
try:
    exec(statement, {})
except SystemExit as end:
    status = end.code or 0
else:
    status = 0
print()
print(json.dumps({"loaded": [name for name in names if name in sys.modules], "status": status}))
"""

HELP = "import runpy, sys; sys.argv = ['secure-fed', {}]; runpy.run_module('secure_fed', run_name='__main__')"


def probe(statement: str, names: tuple[str, ...] = HEAVY) -> tuple[dict[str, object], str]:
    """Run `statement` in a fresh interpreter: its exit status, the `names` it loaded, what it printed."""
    done = subprocess.run([sys.executable, "-c", PROBE, statement, *names], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    printed, _, last = done.stdout.rstrip().rpartition("\n")
    return json.loads(last), printed


def test_the_probe_sees_what_was_loaded() -> None:
    result, _ = probe("import decimal", ("decimal", "torch"))
    assert result == {"loaded": ["decimal"], "status": 0}


@pytest.mark.parametrize("package", ["secure_fed", "privacy", "protocols", "attacks"])
def test_a_package_loads_nothing_heavy(package: str) -> None:
    result, _ = probe(f"import {package}")
    assert result["loaded"] == []


@pytest.mark.parametrize("module", ["ledger", "account", "statement", "errors", "entropy", "sampling"])
def test_a_ledger_is_read_without_loading_anything_heavy(module: str) -> None:
    result, _ = probe(f"import privacy.{module}")
    assert result["loaded"] == []


@pytest.mark.parametrize("arguments", ["'--help'", "'train', '--help'", "'budget', '--help'"])
def test_help_loads_nothing_heavy(arguments: str) -> None:
    result, printed = probe(HELP.format(arguments))
    assert result == {"loaded": [], "status": 0}
    assert "secure-fed" in printed


def test_the_public_names_are_listed_without_loading_anything_heavy() -> None:
    result, _ = probe("import secure_fed; assert {'Federation', 'RunConfig'} <= set(dir(secure_fed))")
    assert result["loaded"] == []


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    import secure_fed

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = secure_fed.no_such_name


def test_a_federation_without_privacy_loads_no_accounting() -> None:
    result, _ = probe("import secure_fed.federation", ("dp_accounting", "opacus"))
    assert result["loaded"] == []
