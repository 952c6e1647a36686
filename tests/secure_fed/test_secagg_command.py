"""`secure-fed secagg`: its output, its refusals and their exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial

import pytest

from protocols.lies import ATTACKS
from protocols.parameters import Policy
from protocols.server import Server
from secure_fed.commands import secagg as secagg_command
from tests.golden import golden
from tests.secure_fed.conftest import Ran

SMALL = ("--clients", "8", "--dim", "20")
TAMPERED = (*SMALL, "--tamper", "replay", "--json")
RING = ("--clients", "24", "--dim", "20", "--neighbours", "10", "--corrupt", "0")
MEASURED = r"[\d.e-]+ m?s\b|(?<=seconds\": )[\d.e-]+|(?<=_most\": )[\d.e-]+|client \d+ and"


@pytest.fixture
def told(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> Ran:
    """A function: arguments of `secure-fed secagg` -> (exit status, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "80")
    return partial(ran, "secagg")


def test_sums_and_lies_are_shown_as_tables(told: Ran) -> None:
    """Sums with and without checks of a lying server, on complete graphs and rings; a lie that is caught is a success."""
    shown = []
    for arguments in (
        SMALL,
        (*SMALL, "--active", "--bits", "64"),
        RING,
        (*SMALL, "--tamper", "clear-metadata"),
        (*SMALL, "--active", "--tamper", "split-survivors"),
    ):
        status, out, err = told(*arguments)
        assert (status, err) == (0, "")
        assert max(map(len, out.splitlines())) <= 80
        shown += [f"# {' '.join(arguments)}", *(" ".join(line.split()) for line in out.splitlines() if "│" in line)]
    golden("secure_fed/secagg.txt", "\n".join(shown) + "\n", hide=MEASURED)
    assert "exact, bit for bit" in told(*RING, "--active")[1]


def test_a_sum_as_json(told: Ran) -> None:
    status, out, _ = told(*SMALL, "--active", "--json")
    facts = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert (facts["exact"], facts["aborted"], facts["tamper"]) == (True, None, None)
    lossy = json.loads(told(*SMALL, "--dropout", "0.25", "--active", "--json")[1])
    assert (lossy["exact"], lossy["dropped"], lossy["survivors_least"]) == (True, 2, 6)
    golden("secure_fed/secagg_json.txt", json.dumps(facts, indent=1) + "\n", hide=MEASURED)


def test_a_lie_that_is_not_caught_is_a_failure(told: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "check", lambda policy, parameters: None)
    status, out, _ = told(*SMALL, "--tamper", "small-sum")
    assert status == 1
    assert "small-sum: NOT CAUGHT" in out
    status, out, _ = told(*SMALL, "--tamper", "small-sum", "--json")
    facts = json.loads(out)
    assert (status, facts["exact"], facts["tamper"]["caught"], facts["tamper"]["by"]) == (1, True, False, None)


def test_a_sum_that_aborted_or_is_wrong_is_a_failure(told: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    total = Server.total
    with monkeypatch.context() as patched:
        patched.setattr(Server, "total", lambda self: total(self) + total(self).dtype.type(1))
        status, out, _ = told(*SMALL)
        assert status == 1
        assert "WRONG" in out
    everybody = {"mask": list(range(8))}
    monkeypatch.setattr("protocols.simulate.departures", lambda parameters, count: everybody)
    status, out, _ = told(*SMALL, "--json")
    facts = json.loads(out)
    assert (status, facts["exact"], facts["survivors"]) == (1, None, 0)
    assert "0 clients have sent their vectors" in facts["aborted"]


def test_bad_arguments_end_with_two_and_a_sentence(told: Ran) -> None:
    said = []
    for arguments in (
        ("--clients", "8"),
        ("--clients", "eight", "--dim", "1"),
        ("--clients", "1", "--dim", "1"),
        (*SMALL, "--dropout", "2"),
        (*SMALL, "--bits", "16"),
        (*SMALL, "--threshold", "9"),
        (*SMALL, "--neighbours", "3"),
        (*SMALL, "--neighbours", "50"),
        (*SMALL, "--corrupt", "-1"),
        (*SMALL, "--corrupt", "0.4", "--dropout", "0.5", "--active"),
        (*SMALL, "--tamper", "rudeness"),
        (*SMALL, "--tamper", "swapped-key"),
        (*SMALL, "--active", "--tamper", "surround"),
    ):
        status, out, err = told(*arguments)
        assert (status, out) == (2, "")
        assert "Traceback" not in err
        said.append(err.splitlines()[-1])
    golden("secure_fed/secagg_refusals.txt", "\n".join(said) + "\n")


def test_help_lists_every_kind_of_lie(told: Ran) -> None:
    status, out, _ = told("--help")
    assert status == 0
    for kind, attack in ATTACKS.items():
        assert f"  {kind}  (" in out
        assert attack.does.replace(" ", "") in "".join(out.split())
    assert "swapped-key  (the clients, stage share; needs --active)" in out


def test_a_long_run_tells_how_far_it_is_on_standard_error(told: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secagg_command, "_QUIET_SECONDS", 0.0)
    status, out, err = told(*SMALL, "--json")
    assert status == 0
    assert json.loads(out)["exact"]
    assert "secure-fed: stage mask: 3 of 8 clients\n" in err


@pytest.mark.nightly
@pytest.mark.parametrize("arguments", [("--help",), SMALL, TAMPERED])
def test_nothing_heavy_is_loaded(arguments: tuple[str, ...]) -> None:
    probe = (
        "import sys\nfrom secure_fed.commands.cli import main\n"
        "try:\n    main(['secagg', *sys.argv[1:]])\nexcept SystemExit:\n    pass\n"
        "sys.exit('|'.join(sorted({'torch', 'transformers', 'scipy', 'matplotlib', 'pandas'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
