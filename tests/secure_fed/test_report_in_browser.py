"""The report in a real browser: its drawings, the console's messages, and the requests that the page makes.

Headless Chromium is driven through its DevTools protocol over two pipes: JSON messages that end in a zero
byte. Nothing but Chromium itself is needed.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from secure_fed.report.page import write_report
from tests.cells import chosen
from tests.secure_fed.conftest import make_private
from tests.secure_fed.pages import RunFolder, changed
from tests.secure_fed.test_report import Outline

pytestmark = pytest.mark.usefixtures("drawn_once")

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",  # a screenshot has none, so positions must be measured without them
    "--remote-debugging-pipe",
)
HUNG = 60  # seconds without an answer after which the browser counts as hung: a limit, not a measured time
STARTS = 3  # on a loaded machine Chromium sometimes ends before its first answer, whatever the page

DARK = (21, 24, 28)  # --page of page.css, dark and light
LIGHT = (251, 250, 247)


def browser_program() -> str:
    for name in BROWSERS:
        if found := shutil.which(name):
            return found
    why = (
        "this test opens the report in headless Chromium, and there is none on the PATH:"
        " install it with `apt-get install chromium` (Debian) or put Chrome there as google-chrome"
    )
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)  # outside CI, tests pass without a browser


class BrowserError(Exception):
    """Chromium itself ended or hangs."""


class Browser:
    """One page of a headless Chromium; `events` is all that the page reported since it was opened."""

    def __init__(self, answers: int, commands: int) -> None:
        self._answers = answers
        self._commands = commands
        self._received = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """The result of one command; what the page reports meanwhile is added to `events`."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])
            self.events.append(answer)

    def open(self, url: str) -> None:
        """Show `url` and return when it and all it refers to has loaded or failed."""
        self.events.clear()
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """The URLs that the page requested, its own included."""
        return [
            event["params"]["request"]["url"] for event in self.events if event["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """Everything on the console, whatever its level."""
        console = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        return [json.dumps(event["params"]) for event in self.events if event["method"] in console]

    def screen(self, *, width: int, scheme: str) -> None:
        """Sets the window's width and the reader's preference for a `light` or `dark` page."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, box: dict[str, float]) -> np.ndarray:
        """The pixels of a part of the page, (height, width, 3), 0 to 255."""
        shot = self.call("Page.captureScreenshot", clip={**box, "scale": 1}, captureBeyondViewport=True)
        pixels = image.imread(io.BytesIO(base64.b64decode(shot["data"])), format="png")
        return np.rint(pixels[..., :3] * 255).astype(int)

    def whole_picture(self) -> np.ndarray:
        """The pixels of the whole page."""
        width, height = self.evaluate("[document.documentElement.scrollWidth, document.documentElement.scrollHeight]")
        return self.picture({"x": 0, "y": 0, "width": width, "height": height})

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], HUNG)
            chunk = os.read(self._answers, 1 << 16) if ready else b""
            if not chunk:
                raise BrowserError("Chromium ended or hangs")
            self._received += chunk
        message, self._received = self._received.split(b"\0", 1)
        return dict(json.loads(message))


@contextmanager
def running_browser(folder: Path) -> Iterator[Browser]:
    """A fresh Chromium with its profile in `folder`; it reads commands from descriptor 3, answers on 4."""
    command = [browser_program(), *FLAGS, f"--user-data-dir={folder / 'profile'}", "about:blank"]
    moved = 'exec "$@" 3<&0 4>&1 </dev/null >"$0" 2>&1'
    with subprocess.Popen(
        ["sh", "-c", moved, str(folder / "chromium.log"), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "HOME": str(folder)},
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Browser(process.stdout.fileno(), process.stdin.fileno())
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A Chromium that answers: one that ends before its first page is shown is started again, in a new folder."""
    with ExitStack() as until_the_end:
        for start in range(1, STARTS + 1):
            folder = tmp_path_factory.mktemp("chromium")
            try:
                running = until_the_end.enter_context(running_browser(folder))
            except (BrowserError, BrokenPipeError) as gone:
                if start == STARTS:
                    its_words = (folder / "chromium.log").read_text(errors="replace")[-3000:]
                    pytest.fail(f"{gone}, {STARTS} times in turn; its last words: {its_words}")
            else:
                break
        yield running


BOXES = """
[...document.querySelectorAll("svg")].map(svg => {
  const box = svg.getBoundingClientRect();
  const outside = [...svg.querySelectorAll("text")].filter(text => {
    const part = text.getBoundingClientRect();
    return part.left < box.left - 2 || part.right > box.right + 2
        || part.top < box.top - 2 || part.bottom > box.bottom + 2;
  });
  return {name: svg.getAttribute("aria-label"), words: svg.querySelectorAll("text").length,
          outside: outside.map(text => text.textContent),
          box: {x: box.x + scrollX, y: box.y + scrollY, width: box.width, height: box.height}};
})
"""


def assert_drawn(page: np.ndarray, drawing: dict[str, Any]) -> None:
    """A drawing takes up room, keeps its words inside itself, and shows data. page: its pixels."""
    name, box = drawing["name"], drawing["box"]
    assert box["width"] > 200, name
    assert box["height"] > 40, name
    assert drawing["words"] >= 2, name
    assert drawing["outside"] == [], name
    left, top, below_legend = int(box["x"]), int(box["y"]), int(box["y"] + 0.17 * box["height"])
    pixels = page[below_legend : int(top + box["height"]), left : int(left + box["width"])]
    # Only data are coloured; words, axes and ground are grey or nearly so.
    coloured = (pixels.max(axis=-1) - pixels.min(axis=-1) > 40).sum()
    assert coloured >= 8, f"{name} shows no data"


def test_a_page_needs_nothing_else(run_folder: RunFolder) -> None:
    """It has all its drawings, no script, and nothing to fetch; drawings refer only to what they define."""
    outline = Outline(run_folder(1))
    assert outline.tags.count("svg") == 8
    assert {"script", "link", "img", "iframe", "object"}.isdisjoint(outline.tags)
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert ("content", policy) in outline.attributes
    for name, value in outline.attributes:
        assert not name.startswith("on")
        assert name not in ("href", "xlink:href", "src") or value.startswith("#")
        assert "url(" not in value or "url(#" in value
    assert "url(" not in outline.style
    assert "@import" not in outline.style
    defined = [value for name, value in outline.attributes if name == "id"]
    used = {value[1:] for name, value in outline.attributes if name == "xlink:href"}
    used |= {found for _, value in outline.attributes for found in re.findall(r"url\(#([^)]+)\)", value)}
    assert used
    assert used <= set(defined)
    assert len(defined) == len(set(defined))


@pytest.mark.parametrize(
    ("rounds", "width", "scheme"),
    chosen(itertools.product((1, 12), (1200, 380), ("light", "dark")), [(1, 380, "dark")]),
)
def test_every_plot_is_visible_in_the_readers_light(
    browser: Browser, run_folder: RunFolder, width: int, scheme: str, rounds: int
) -> None:
    browser.screen(width=width, scheme=scheme)
    browser.open(write_report(run_folder(rounds)).as_uri())
    drawings = browser.evaluate(BOXES)
    assert len(drawings) == 8
    pixels = browser.whole_picture()
    assert (pixels[:4, :4] == {"light": LIGHT, "dark": DARK}[scheme]).all()
    for drawing in drawings:
        assert_drawn(pixels, drawing)


def test_a_phone_shows_every_page_without_scrolling_sideways(browser: Browser, run_folder: RunFolder) -> None:
    browser.screen(width=360, scheme="light")
    names = {
        "run.clients.0": "general-hospital-" * 8,
        "config.model.name": "/srv/models/" + "a-very-long-folder-name" * 6,
        "result.privacy.mechanism": "a-very-long-mechanism" * 9,
    }
    for private in (True, False):
        edit = changed(names, lambda run, private=private: make_private(run, private=private))
        browser.open(write_report(run_folder(1, edit=edit, name=f"private {private}")).as_uri())
        browser.evaluate('document.querySelectorAll("details").forEach(part => part.open = true)')
        assert browser.evaluate("document.documentElement.scrollWidth") <= 360
        warned = browser.evaluate('document.querySelectorAll("section.warning").length')
        assert warned == (0 if private else 1)


def test_nothing_is_fetched_and_a_script_in_a_clients_name_is_only_shown(
    browser: Browser, run_folder: RunFolder
) -> None:
    name = "<script>document.title = 'taken'</script><img src=x onerror=\"document.title = 'taken'\">"
    edit = changed({"run.clients.0": name, "rows.0.rejected": [name]})
    url = write_report(run_folder(1, edit=edit)).as_uri()
    browser.open(url)
    assert name in browser.evaluate("document.body.innerText")
    assert browser.evaluate("document.title") == "hand-made: federated fine-tuning report"
    assert browser.evaluate("document.scripts.length + document.images.length") == 0
    assert browser.requests() == [url]
    assert browser.complaints() == []


def test_the_witness_sees_a_request_an_error_and_an_empty_drawing(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "bad.html"
    page.write_text(
        '<img src="http://127.0.0.1:9/pixel.png"><script>console.error("seen"); nothing.here()</script>'
        '<svg aria-label="empty" width="300" height="200"><rect x="50" y="50" width="90" height="90"/>'
        '<text x="9" y="99">a</text><text x="9" y="150">b</text></svg>',
        encoding="utf-8",
    )
    browser.open(page.as_uri())
    assert "http://127.0.0.1:9/pixel.png" in browser.requests()
    complaints = " ".join(browser.complaints())
    assert "seen" in complaints
    assert "nothing is not defined" in complaints
    with pytest.raises(AssertionError, match="empty shows no data"):
        assert_drawn(browser.whole_picture(), browser.evaluate(BOXES)[0])
