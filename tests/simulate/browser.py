"""A headless browser over DevTools' pipe: pages as files, at any width, in any colour scheme."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe"),
    "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing leaves, whatever a page asks for
)
PATIENCE = 120
"""Seconds of silence after which a browser is taken for dead: far more than any page takes here."""


def found_browser() -> str:
    """The browser's path; without one the test is skipped."""
    for name in NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip(
        f"no browser: none of {', '.join(NAMES)} is on the PATH (Debian: apt-get install chromium)"
    )


@dataclass
class Browser:
    """One page of a running browser."""

    commands: IO[bytes]
    answers: IO[bytes]
    session: str | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    _unread: bytes = b""
    _number: int = 0

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self.session is not None:
            message["sessionId"] = self.session
        self.commands.write(json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, f"{method}: {answer}"
        return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self.answers], [], [], PATIENCE)
            assert ready, f"the browser said nothing for {PATIENCE} s"
            more = os.read(self.answers.fileno(), 1 << 20)
            assert more, "the browser has gone"
            self._unread += more
        text, self._unread = self._unread.split(b"\0", 1)
        found: dict[str, Any] = json.loads(text)
        return found

    def open(self, path: Path, width: int, *, is_dark: bool = False) -> None:
        """Load a file afresh, as a screen of this width shows it."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=800,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        while not self.heard("Page.loadEventFired"):
            self.events.append(self._read())

    def heard(self, method: str) -> list[dict[str, Any]]:
        """What events of a name told since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") == method]

    def value(self, expression: str) -> Any:
        """What an expression is in the page, by the debugger: its policy does not bind this."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(found["data"])


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """Run a browser whose profile is a folder of its own."""
    path = found_browser()
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser reads from descriptor 3 and writes to 4, so the shell puts them there.
    script = f'exec "$0" "$@" 3<&{to_read} 4>&{from_write}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", script, path, *SWITCHES, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_read)
    os.close(from_write)
    try:
        with os.fdopen(to_write, "wb", 0) as commands, os.fdopen(from_read, "rb", 0) as answers:
            page = Browser(commands, answers)
            target = next(
                each
                for each in page.call("Target.getTargets")["targetInfos"]
                if each["type"] == "page"
            )
            page.session = page.call(
                "Target.attachToTarget", targetId=target["targetId"], flatten=True
            )["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                page.call(f"{domain}.enable")
            yield page
    finally:
        process.terminate()
        process.wait()
