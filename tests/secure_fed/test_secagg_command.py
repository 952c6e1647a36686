"""`secure-fed secagg`: its output, its refusals and their exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

from protocols.lies import ATTACKS
from protocols.parameters import Policy
from protocols.server import Server
from secure_fed.commands import secagg as secagg_command
from secure_fed.commands.cli import main
from tests.cells import chosen

SMALL = ("--clients", "8", "--dim", "20")
TAMPERED = (*SMALL, "--tamper", "replay", "--json")
RING = ("--clients", "24", "--dim", "20", "--neighbours", "10", "--corrupt", "0")
Told = Callable[..., tuple[int, str, str]]


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Told:
    """A function: arguments of `secure-fed secagg` -> (exit status, standard output, standard error)."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main(["secagg", *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def words(out: str) -> str:
    """A table's text, without rules and line breaks."""
    return " ".join("".join(" " if sign in "│┃" else sign for sign in out).split())


@pytest.mark.parametrize("arguments", [SMALL, (*SMALL, "--active", "--bits", "64"), RING, (*RING, "--active")])
def test_a_sum_is_shown_as_a_table(told: Told, arguments: tuple[str, ...]) -> None:
    status, out, err = told(*arguments)
    assert (status, err) == (0, "")
    stages = ("advertise", "share", "mask", "unmask")
    more = ("consistency",) if "--active" in arguments else ()
    assert all(f"│ {stage} " in out for stage in (*stages, *more))
    assert max(map(len, out.splitlines())) <= 80
    assert "sum exact, bit for bit" in words(out)
    assert "tampering" not in out
    assert "aborted" not in out
    assert "abort by chance probability 0" in words(out)


def test_probabilities_are_shown_as_powers_of_two() -> None:
    shown = [secagg_command._power(probability) for probability in (0.0, 2.0**-40, 3e-7, 0.75, 1.0)]
    assert shown == ["probability 0", *(f"probability {what}" for what in ("2^-40.0", "2^-21.7", "0.75", "1"))]


def test_a_sum_as_json(told: Told) -> None:
    status, out, _ = told(*SMALL, "--dropout", "0.25", "--active", "--json")
    facts = json.loads(out)
    assert status == 0
    assert out.count("\n") == 1
    assert set(facts) == {
        *(
            "clients",
            "dim",
            "bits",
            "active",
            "neighbours",
            "threshold",
            "survivors_least",
            "failure",
            "dropped",
            "stages",
        ),
        *("abort_probability", "survivors", "exact", "aborted", "bytes_total", "tamper"),
    }
    assert [facts[name] for name in ("clients", "dim", "bits", "active", "dropped")] == [8, 20, 32, True, 2]
    assert (facts["exact"], facts["aborted"], facts["tamper"]) == (True, None, None)
    assert (facts["neighbours"], facts["survivors_least"]) == (7, 6)
    assert [stage["name"] for stage in facts["stages"]] == ["advertise", "share", "mask", "consistency", "unmask"]
    for stage in facts["stages"]:
        assert set(stage) == {
            *("name", "bytes_up", "bytes_down", "client_seconds", "client_seconds_most", "server_seconds", "answered"),
        }


def test_a_lie_that_is_caught_is_a_success(told: Told) -> None:
    status, out, _ = told(*SMALL, "--tamper", "clear-metadata", "--json")
    facts = json.loads(out)
    assert status == 0
    assert facts["tamper"] == {
        "kind": "clear-metadata",
        "caught": True,
        "by": "the server",
        "stage": "mask",
        "what": "no masked message: 31 bytes too many at the end",
    }
    assert (facts["exact"], facts["survivors"]) == (True, 7)
    status, out, _ = told(*SMALL, "--active", "--tamper", "split-survivors")
    assert status == 0
    assert "tampering split-survivors: caught" in words(out)
    assert "noticed by client" in words(out)
    assert "stage unmask" in words(out)
    assert "aborted" in out
    assert "sum none" in words(out)


def test_a_lie_that_is_not_caught_is_a_failure(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "check", lambda policy, parameters: None)
    status, out, _ = told(*SMALL, "--tamper", "small-sum")
    assert status == 1
    assert "small-sum: NOT CAUGHT" in out
    assert "nobody noticed" in words(out)
    status, out, _ = told(*SMALL, "--tamper", "small-sum", "--json")
    facts = json.loads(out)
    assert (status, facts["exact"]) == (1, True)
    assert facts["tamper"] == {
        **{"kind": "small-sum", "caught": False, "by": None, "stage": None},
        "what": "nobody noticed",
    }


def test_a_sum_that_aborted_or_is_wrong_is_a_failure(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--clients", "8"), "--dim"),
        (("--clients", "eight", "--dim", "1"), "invalid int value: 'eight'"),
        (("--clients", "1", "--dim", "1"), "clients is 1: choose from 2 to"),
        ((*SMALL, "--dropout", "2"), "dropout is 2.0"),
        ((*SMALL, "--bits", "16"), "16"),
        ((*SMALL, "--threshold", "9"), "threshold is 9"),
        ((*SMALL, "--neighbours", "3"), "neighbours is 3, fewer than all: choose an even number"),
        ((*SMALL, "--neighbours", "50"), "--neighbours is 50, and each of 8 clients has 7 others: lower it"),
        ((*SMALL, "--corrupt", "-1"), "corrupt is -1.0"),
        ((*SMALL, "--corrupt", "0.4", "--dropout", "0.5", "--active"), "lower"),
        ((*SMALL, "--tamper", "rudeness"), "tamper is 'rudeness': choose one of weak-masks, "),
        (
            (*SMALL, "--tamper", "swapped-key"),
            "tamper is swapped-key: only an active session can notice it: set active",
        ),
        ((*SMALL, "--active", "--tamper", "surround"), "tamper is surround: it needs an incomplete graph"),
    ],
)
def test_bad_arguments_end_with_two_and_a_sentence(told: Told, arguments: tuple[str, ...], says: str) -> None:
    status, out, err = told(*arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert "Traceback" not in err


def test_help_lists_every_kind_of_lie(told: Told) -> None:
    status, out, _ = told("--help")
    assert status == 0
    for kind, attack in ATTACKS.items():
        assert f"  {kind}  (" in out
        assert attack.does.replace(" ", "") in "".join(out.split())
    assert "swapped-key  (the clients, stage share; needs --active)" in out


def test_a_long_run_tells_how_far_it_is_on_standard_error(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secagg_command, "_QUIET_SECONDS", 0.0)
    status, out, err = told(*SMALL, "--json")
    assert status == 0
    assert json.loads(out)["exact"]
    assert "secure-fed: stage mask: 3 of 8 clients\n" in err


@pytest.mark.parametrize("arguments", chosen([("--help",), SMALL, TAMPERED], [TAMPERED], whole=True))
def test_nothing_heavy_is_loaded(arguments: tuple[str, ...]) -> None:
    probe = (
        "import sys\nfrom secure_fed.commands.cli import main\n"
        "try:\n    main(['secagg', *sys.argv[1:]])\nexcept SystemExit:\n    pass\n"
        "sys.exit('|'.join(sorted({'torch', 'transformers', 'scipy', 'matplotlib', 'pandas'} & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
