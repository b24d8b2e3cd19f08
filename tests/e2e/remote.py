"""Browsers as they are installed, driven over their own WebSocket protocols, for what Playwright cannot do.

Playwright drives no stock Firefox, and it keeps every page of Chromium visible.  Firefox speaks WebDriver BiDi
(https://w3c.github.io/webdriver-bidi), Chromium the DevTools protocol (https://chromedevtools.github.io/devtools-protocol).
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from websockets.sync.client import ClientConnection, connect

from .conftest import CHROMIUM, network_flags
from .test_demo import Visitor

FIREFOX = shutil.which("firefox-esr") or shutil.which("firefox")

# Keeps what page and server say to each other, and what went wrong in the page.
LISTEN_IN = """
window.said = [];
window.faults = [];
addEventListener("error", ({ message }) => faults.push(message));
addEventListener("unhandledrejection", ({ reason }) => faults.push(`${reason}`));
for (const level of ["warn", "error"]) {
  const plain = console[level];
  console[level] = (...words) => { faults.push(words.join(" ")); plain(...words); };
}
const Plain = WebSocket;
window.WebSocket = class extends Plain {
  constructor(...where) {
    super(...where);
    this.addEventListener("message", ({ data }) => said.push(["received", data]));
  }
  send(data) {
    said.push(["sent", data]);
    super.send(data);
  }
};
"""


class Tab(Protocol):
    """A page of a browser."""

    def goto(self, url: str) -> None: ...

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise; a user has just pressed something."""


class _Wire:
    """Commands and their answers, one at a time.  What else the browser says is not listened to."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._ids = itertools.count(1)

    def call(self, method: str, *, session: str | None = None, **params: Any) -> Any:
        message = {"id": next(self._ids), "method": method, "params": params}
        self._socket.send(json.dumps(message if session is None else message | {"sessionId": session}))
        while (answer := json.loads(self._socket.recv(timeout=30))).get("id") != message["id"]:
            pass
        assert "result" in answer, f"{method}: {answer}"
        return answer["result"]


@contextmanager
def _running(command: list[str], path: str) -> Iterator[_Wire]:
    """A browser that tells on standard error where it listens."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = next((m[0] for line in process.stderr if (m := re.search(r"ws://\S+", line))), None)
        assert address is not None, f"{command[0]} did not start"
        with connect(address + path, max_size=None, proxy=None) as socket:
            yield _Wire(socket)
    finally:
        process.terminate()
        process.stderr.close()
        process.wait(20)


class _FirefoxTab:
    def __init__(self, wire: _Wire, context: str) -> None:
        self._wire = wire
        self._context = context

    def goto(self, url: str) -> None:
        self._wire.call("browsingContext.navigate", context=self._context, url=url, wait="complete")

    def evaluate(self, expression: str) -> Any:
        answer = self._wire.call(
            "script.evaluate",
            expression=f"(async () => JSON.stringify(await ({expression})) ?? 'null')()",
            target={"context": self._context},
            awaitPromise=True,
            userActivation=True,
        )
        assert answer["type"] == "success", answer["exceptionDetails"]["text"]
        return json.loads(answer["result"]["value"])


@contextmanager
def firefox(**preferences: bool | int | str) -> Iterator[Tab]:
    """The page of a fresh headless Firefox that plays sound without being asked."""
    assert FIREFOX is not None
    wanted = {
        "media.autoplay.default": 0,
        "media.peerconnection.ice.loopback": bool(network_flags()),
        "datareporting.policy.dataSubmissionEnabled": False,
        "network.captive-portal-service.enabled": False,
    } | preferences
    with tempfile.TemporaryDirectory() as profile:
        lines = (f"user_pref({json.dumps(name)}, {json.dumps(value)});\n" for name, value in wanted.items())
        Path(profile, "user.js").write_text("".join(lines))
        command = [FIREFOX, "--headless", "--no-remote", "--profile", profile, "--remote-debugging-port", "0"]
        with _running([*command, "about:blank"], "/session") as wire:
            wire.call("session.new", capabilities={})
            wire.call("script.addPreloadScript", functionDeclaration=f"() => {{ {LISTEN_IN} }}")
            yield _FirefoxTab(wire, wire.call("browsingContext.getTree")["contexts"][0]["context"])


class ChromiumTab:
    def __init__(self, wire: _Wire) -> None:
        self._wire = wire
        self._target = wire.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = wire.call("Target.attachToTarget", targetId=self._target, flatten=True)["sessionId"]
        self.call("Page.addScriptToEvaluateOnNewDocument", source=LISTEN_IN)
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> Any:
        """A command of the DevTools protocol, to this tab."""
        return self._wire.call(method, session=self._session, **params)

    def goto(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        while not self.evaluate(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})"):
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")


class ChromiumWindow:
    """A fresh headless Chromium with one window, that treats tabs as everybody's does."""

    def __init__(self, wire: _Wire) -> None:
        self._wire = wire

    def tab(self) -> ChromiumTab:
        """Another tab; it is shown."""
        return ChromiumTab(self._wire)


@contextmanager
def chromium_window(*flags: str) -> Iterator[ChromiumWindow]:
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--no-first-run",
            "--remote-debugging-port=0",
            "--autoplay-policy=no-user-gesture-required",
            f"--user-data-dir={profile}",
            *network_flags(),
            *flags,
        ]
        with _running([*command, "about:blank"], "") as wire:
            yield ChromiumWindow(wire)


class RemoteVisitor(Visitor):
    """A visitor in such a tab."""

    def __init__(self, tab: Tab, address: str) -> None:
        self.tab = tab
        self.sent = []
        self.received = []
        self.faults = []
        tab.goto(address)

    def listen(self) -> None:
        """Take what was said since the last time."""
        said, faults = self.tab.evaluate("[said.splice(0), faults.splice(0)]")
        for direction, message in said:
            (self.sent if direction == "sent" else self.received).append(json.loads(message))
        self.faults += faults

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)
        self.listen()

    def press(self, button: str) -> None:
        self.tab.evaluate(f"document.getElementById({json.dumps(button)}).click()")

    def type(self, text: str) -> None:
        self.tab.evaluate(
            f"""(() => {{
              document.getElementById("text").value = {json.dumps(text)};
              document.getElementById("form").requestSubmit();
            }})()"""
        )

    def notices(self) -> list[str]:
        notices: list[str] = self.tab.evaluate("[...document.querySelectorAll('.notice')].map((n) => n.innerText)")
        return notices
