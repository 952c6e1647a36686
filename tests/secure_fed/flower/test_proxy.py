"""The shipped proxy, in a real nginx: nodes reach a SuperLink's Fleet interface, and nobody any other of its interfaces."""

from __future__ import annotations

import http.client
import re
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.flower_keys import certificates
from tests.flower_loopback import HOST
from tests.nginx import needs_nginx, proxy

pytestmark = [needs_nginx, pytest.mark.slow]
FLEET = "/v1/fleet/"


@dataclass
class Behind:
    """A server behind the proxy: the requests that reached it, as method, path as sent, and length of the body."""

    ask: Callable[..., int] = lambda *_: 0
    reached: list[tuple[str, str, int]] = field(default_factory=list)


@contextmanager
def recorder(folder: Path, reached: list[tuple[str, str, int]]) -> Iterator[int]:
    """The port of a TLS server that records each request."""

    class Recorder(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            reached.append((self.command, self.path, len(body)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_GET = do_POST = do_PUT = do_HEAD = do_OPTIONS = handle_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((HOST, 0), Recorder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Behind]:
    """A recording server behind the proxy. ask: the status of a request to the proxy."""
    folder = tmp_path_factory.mktemp("proxy")
    certificates(folder, HOST)
    found = Behind()
    with recorder(folder, found.reached) as server, proxy(folder / "nginx", server, folder) as port:
        trusted = ssl.create_default_context(cafile=folder / "ca.pem")

        def ask(method: str, path: str, body: bytes | None = None) -> int:
            connection = http.client.HTTPSConnection(HOST, port, context=trusted, timeout=20)
            connection.request(method, path, body)
            return connection.getresponse().status

        found.ask = ask
        yield found


def every_path() -> list[tuple[str, str]]:
    """The method and path of every route of a SuperLink, from Flower's own application."""
    from fastapi.routing import APIRoute, iter_route_contexts
    from flwr.superlink.main import create_app

    routes = [one.route for one in iter_route_contexts(create_app().routes)]
    named = [(method, route.path) for route in routes if isinstance(route, APIRoute) for method in route.methods]
    return [*named, *[("GET", path) for path in ("/", "/docs", "/openapi.json")]]


def test_of_all_routes_of_a_superlink_those_for_nodes_are_let_through(through: Behind) -> None:
    paths = every_path()
    begins = {re.match("/(v1/)?[^/]*", path)[0] for _, path in paths}  # type: ignore[index]
    assert {"/v1/fleet", "/v1/control", "/v1/runtime", "/health"} <= begins
    for method, path in paths:
        through.reached.clear()
        status = through.ask(method, path, b"x" if method == "POST" else None)
        if path.startswith(FLEET):
            assert (method, status, through.reached) == ("POST", 200, [("POST", path, 1)])
        else:
            assert (path, status, through.reached) == (path, 404, [])


@pytest.mark.parametrize(
    "path",
    [
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2e%2e%2fcontrol%2fstart-run",
        "/v1/fleet//../control/start-run",
        "/v1/fleet/./../../v1/control/start-run",
        "/v1/control/start-run/%2e%2e/%2e%2e/control/start-run",
        "/v1/control/start-run?/v1/fleet/",
        "/v1/control/start-run#/v1/fleet/",
        "/V1/FLEET/../control/start-run",
        "/v1/fleet",
        "/v1/fleetx/pull-messages",
        "//v1/control/start-run",
    ],
)
def test_no_way_of_writing_a_path_leads_elsewhere(through: Behind, path: str) -> None:
    through.reached.clear()
    assert through.ask("POST", path, b"x") in (301, 400, 404)
    assert through.reached == []


@pytest.mark.parametrize(
    "path",
    ["/v1/control/../fleet/pull-messages", "/v1/fleet/%252e%252e/control/start-run", "/v1/fleet/x/%2e%2e/get-run"],
)
def test_a_path_is_passed_on_in_the_form_that_was_compared(through: Behind, path: str) -> None:
    """A server that resolved what the proxy did not, or the other way round, would be led elsewhere."""
    through.reached.clear()
    through.ask("POST", path, b"x")
    assert all(sent.startswith(FLEET) and "/../" not in sent for _, sent, _ in through.reached)


def test_a_node_only_posts(through: Behind) -> None:
    through.reached.clear()
    assert [through.ask(method, f"{FLEET}get-run") for method in ("GET", "PUT", "OPTIONS")] == [403] * 3
    assert through.reached == []


def test_the_largest_piece_of_an_array_fits(through: Behind) -> None:
    from flwr.common import constant

    piece = constant.FLWR_PRIVATE_MAX_ARRAY_CHUNK_SIZE
    through.reached.clear()
    assert through.ask("POST", f"{FLEET}push-object", bytes(piece + 100_000)) == 200
    assert through.reached == [("POST", f"{FLEET}push-object", piece + 100_000)]


def test_a_server_behind_it_under_another_key_gets_nothing(through: Behind, tmp_path: Path) -> None:
    """The proxy checks the SuperLink's certificate: another user's process on that port reads no message of a node."""
    reached: list[tuple[str, str, int]] = []
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir()
        certificates(folder, HOST)
    with recorder(theirs, reached) as server, proxy(tmp_path / "nginx", server, ours) as port:
        connection = http.client.HTTPSConnection(
            HOST, port, context=ssl.create_default_context(cafile=ours / "ca.pem"), timeout=20
        )
        connection.request("POST", f"{FLEET}get-run", b"x")
        assert connection.getresponse().status == 502
    assert reached == []
