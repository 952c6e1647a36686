"""A node that cannot connect ends with one sentence and an exit status, whatever Flower prints."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from secure_fed.errors import SecureFedError
from secure_fed.flower.supernode import FlowerError, Link, LinkError, Tail, UnknownKeyError, UntrustedError, _judged
from tests.flower_keys import auth_keys, certificates
from tests.flower_loopback import HOST, ROOT, Loopback, loopback
from tests.secure_fed.deployment.parties import new_node

CERTIFICATE = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate is not yet valid"


@pytest.fixture
def link(tmp_path: Path) -> Link:
    for name in ("ca.pem", "node.key"):
        (tmp_path / name).write_text("x")
    return Link("fed.example.org:8000", tmp_path / "ca.pem", auth_key=tmp_path / "node.key")


@pytest.mark.parametrize(
    ("said", "kind", "sentence"),
    [
        (CERTIFICATE, UntrustedError, r"is not accepted \(certificate is not yet valid\)"),
        ("[SSL: WRONG_VERSION_NUMBER] wrong version number", UntrustedError, "does not speak TLS"),
        ("[code: 2001] SuperNode authentication is enabled.", LinkError, "give --auth-key"),
        ("[code: 2004] Failed to activate SuperNode.", UnknownKeyError, "have its public half registered there"),
        (
            "RuntimeError: SuperNode Runtime HTTP API failed to start.",
            FlowerError,
            "port 1234 of this machine is taken",
        ),
        ("whatever else", FlowerError, "could not reach fed.example.org:8000"),
    ],
)
def test_what_flower_says_becomes_one_sentence_and_a_status(
    link: Link, tmp_path: Path, said: str, kind: type[SecureFedError], sentence: str
) -> None:
    with pytest.raises(kind, match=sentence) as raised:
        _judged(said, link, 1234, tmp_path / "flower.log")
    assert type(raised.value) is kind


def test_a_connection_that_was_there_is_tried_again(link: Link, tmp_path: Path) -> None:
    assert _judged("SuperNode ID: 12", link, 1234, tmp_path / "flower.log") == "the connection was lost"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"superlink": "fed.example.org"}, "give HOST:PORT"),
        ({"superlink": "fed.example.org:8000"}, "has no certificate"),
        ({"superlink": "a:1", "insecure": True, "auth_key": Path("k")}, "leave one of them out"),
        ({"superlink": "a:1", "root_certificates": Path("nowhere.pem")}, "nowhere.pem is not there"),
    ],
)
def test_a_link_is_not_made_of_nonsense(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(LinkError, match=sentence):
        Link(**given)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def superlink(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loopback]:
    """A SuperLink with TLS and node authentication, and no node."""
    with loopback(tmp_path_factory.mktemp("link"), [], tls=True, auth=True) as started:
        yield started


def node_run(folder: Path, superlink: str, *options: str) -> tuple[int, str]:
    """The exit status and the last line of `secure-fed node run`."""
    command = [sys.executable, "-m", "secure_fed", "node", "run", str(folder), "--superlink", superlink, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FLWR_HOME": str(folder / "flwr")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=environment, check=False)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.mark.nightly
def test_flowers_own_failures_end_a_node_with_one_sentence(superlink: Loopback, tmp_path: Path) -> None:
    node = new_node(tmp_path)
    here, ca = f"{HOST}:{superlink.port}", str(superlink.certificate)
    other = tmp_path / "other"
    other.mkdir()
    certificates(other, HOST)
    auth_keys(tmp_path / "new.key")
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        found = {
            "wrong authority": node_run(node, here, "--root-certificates", str(other / "ca.pem")),
            "no key": node_run(node, here, "--root-certificates", ca),
            "unknown key": node_run(node, here, "--root-certificates", ca, "--auth-key", str(tmp_path / "new.key")),
            "port taken": node_run(node, here, "--root-certificates", ca, "--port", port),
        }
    with loopback(tmp_path / "ahead", [], tls=True, ahead=timedelta(days=3)) as early:
        given = (f"{HOST}:{early.port}", "--root-certificates", str(early.certificate))
        found["clock wrong"] = node_run(node, *given)
    statuses = {"wrong authority": 6, "no key": 2, "unknown key": 7, "port taken": 1, "clock wrong": 6}
    assert {name: status for name, (status, _) in found.items()} == statuses
    for name, words in {
        "wrong authority": "is not accepted (unable to get local issuer certificate)",
        "no key": "admits only known nodes",
        "unknown key": "does not know the key",
        "port taken": f"port {port} of this machine is taken",
        "clock wrong": "is not accepted (certificate is not yet valid)",
    }.items():
        assert words in found[name][1], found


def test_a_log_is_read_from_where_it_was_left_also_after_it_was_put_aside(tmp_path: Path) -> None:
    log = tmp_path / "flower.log"
    log.write_bytes(b"an earlier run\n")
    tail = Tail(log)
    for new, known in (("a\n", "a\n"), ("", "a\n"), ("b\n", "a\nb\n")):
        with open(log, "a") as file:
            file.write(new)
        assert tail.read() == known
    log.write_bytes(b"c\n")
    assert tail.read() == "a\nb\nc\n"
    log.write_text("x" * 300_000)
    for _ in range(5):
        found = tail.read()
    assert found == "x" * len(found)
    assert len(found) <= 100_000
