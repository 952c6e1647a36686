"""Envelopes through Flower's own processes on this machine: ServerApp, SuperLink, SuperNodes, ClientApps, agents, and back.

All bytes between the nodes and the SuperLink are recorded. test_deployed.py has the tests with TLS and node authentication.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from secure_fed.deployment.agent import serve
from secure_fed.deployment.envelope import Envelope
from tests.flower_loopback import Loopback, loopback

pytestmark = pytest.mark.nightly

PROJECT = """
[project]
name = "echo"
version = "1.0.0"
[tool.flwr.app]
publisher = "secure-fed"
[tool.flwr.app.components]
serverapp = "asking:app"
clientapp = "secure_fed.flower.node_app:app"
"""
MARK = bytes(range(7, 255, 3))  # bytes that a test finds in the recording
ASKING = f"""
import json, time
import numpy as np
from flwr.serverapp import ServerApp
from secure_fed.deployment.envelope import Envelope
from secure_fed.flower.carrier import GridCarrier

app = ServerApp()


@app.main()
def main(grid, context):
    carrier = GridCarrier(grid)
    while len(carrier.nodes()) < 2:
        time.sleep(0.2)
    mark = np.frombuffer({MARK!r}, np.uint8)
    kinds = {{"mark": mark, "nothing": np.zeros((0, 3), np.float32), "scalar": np.array(2.5), "sign": np.array([True])}}
    ask(carrier, "echo", kinds | {{f"layer {{at}}": np.full((at, 2), at, np.float32) for at in range(200)}})
    ask(carrier, "echo", {{"large": np.random.default_rng(1).integers(0, 256, 12_000_000, dtype=np.uint8)}})
    ask(carrier, "fail", {{}})
    ask(carrier, "sleep", {{}}, 4)
    ask(carrier, "echo", {{"mark": mark}})


def ask(carrier, kind, arrays, seconds=120):
    header = json.dumps({{"kind": kind}}).encode()
    begun = time.monotonic()
    found = []
    sent = {{node: Envelope(header, arrays) for node in carrier.nodes()}}
    for node, answer in filter(None, carrier.exchange(sent, seconds)):
        same = all(np.array_equal(arrays[name], answer.arrays[name][::-1]) for name in arrays if arrays[name].ndim)
        same = same and set(arrays) == set(answer.arrays)
        found.append({{"header": json.loads(answer.header), "same": same}})
    print("ASKED", json.dumps({{"kind": kind, "answers": found, "late": time.monotonic() - begun > seconds + 5}}), flush=True)
"""


def agent_answers(name: str, over: threading.Event, asked: Envelope) -> Envelope:
    """The test agent's answer: the arrays reversed. It fails, or sleeps first, if the request's kind says so."""
    kind = json.loads(asked.header)["kind"]
    if kind == "fail":
        raise RuntimeError("an agent that fails")
    if kind == "sleep":
        over.wait(20)
    turned = {key: array[::-1] if array.ndim else array for key, array in asked.arrays.items()}
    return Envelope(json.dumps({"kind": kind, "agent": name}).encode(), turned)


@dataclass
class Done:
    """A finished run. asked: each request of its ServerApp with the answers, in order."""

    link: Loopback
    asked: list[dict[str, Any]]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Done]:
    """A finished run with two nodes, each with an agent in a thread of this process."""
    folder, over = tmp_path_factory.mktemp("flower"), threading.Event()
    homes = [folder / "north", folder / "south"]
    for home in homes:
        home.mkdir(mode=0o700)
        answers = lambda asked, name=home.name: agent_answers(name, over, asked)  # noqa: E731
        threading.Thread(target=serve, args=(home, answers), daemon=True).start()
    project = folder / "project"
    project.mkdir()
    (project / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    (project / "asking.py").write_text(ASKING, encoding="utf-8")
    with loopback(folder / "link", homes, proxy=True) as link:
        output = link.run(project)
        over.set()
        lines = [line for line in output.splitlines() if line.startswith("ASKED ")]
        yield Done(link, [json.loads(line.removeprefix("ASKED ")) for line in lines])


def test_every_array_comes_back_from_the_agent_of_every_node(done: Done) -> None:
    several, large, *_, last = done.asked
    for asked in (several, large, last):
        assert [one["same"] for one in asked["answers"]] == [True, True]
        assert {one["header"]["agent"] for one in asked["answers"]} == {"north", "south"}


def test_an_agent_that_fails_refuses(done: Done) -> None:
    assert [one["header"]["error"] for one in done.asked[2]["answers"]] == ["AgentFailed"] * 2


def test_nobody_is_waited_for_after_the_deadline(done: Done) -> None:
    assert [done.asked[3][key] for key in ("kind", "answers", "late")] == ["sleep", [], False]


def test_nodes_answer_again_after_a_stage_that_they_missed(done: Done) -> None:
    assert len(done.asked[4]["answers"]) == 2


def test_the_recording_shows_what_travels_in_the_open(done: Done) -> None:
    kept = done.link.recording
    assert kept is not None
    large = np.random.default_rng(1).integers(0, 256, 12_000_000, dtype=np.uint8)
    assert kept.total > 3 * large.nbytes  # to two nodes and back; equal parts of both answers may be sent once
    assert kept.holds(MARK)
    assert kept.holds(large[6_000_000:6_001_000].tobytes())


def test_no_process_writes_a_stack_trace_but_the_agent_that_failed(done: Done) -> None:
    assert "Traceback" not in done.link.outputs(100_000)
