"""A headless browser for the report's page."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BINARY = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """Chromium over its DevTools pipe: messages end in a zero byte."""

    def __init__(self, profile: Path) -> None:
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # The browser reads descriptor 3 and writes descriptor 4, which a shell gives it.
        command = f"exec 3<&{to_browser} 4>&{from_browser}; exec {BINARY} --headless --no-sandbox --disable-gpu --remote-debugging-pipe "
        command += f"--user-data-dir={profile} --no-first-run --disable-extensions --hide-scrollbars about:blank"
        self._process = subprocess.Popen(["bash", "-c", command], pass_fds=(to_browser, from_browser), stderr=subprocess.DEVNULL)
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._rest, self._events = 0, b"", list[dict[str, Any]]()
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for part in ("Page", "Runtime", "Log"):
            self.ask(f"{part}.enable")

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._rest += more
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def _ask(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        whole = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(whole).encode() + b"\0")
        while (found := self._message()).get("id") != self._number:
            self._events.append(found)
        assert "error" not in found, found
        return found["result"]

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """A command of the DevTools protocol to the page."""
        return self._ask(method, self._session, **params)

    def show(self, page: Path, *, width: int, dark: bool = False) -> list[str]:
        """Open a page; returns what it complained of."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600)
        self.ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
        self._events = []
        self.ask("Page.navigate", url=page.as_uri())
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._events.append(self._message())
        bad = ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled")
        return [json.dumps(event["params"]) for event in self._events if event["method"] in bad]

    def value(self, expression: str) -> Any:
        """The value of an expression in the page."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, out: Path, *, top: float = 0, height: float | None = None) -> None:
        """Write a PNG of the page, or of a part of it."""
        import base64

        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": top, "width": size["width"], "height": height or size["height"] - top, "scale": 1}
        found = self.ask("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        out.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self._ask("Browser.close")
        self._process.wait(timeout=20)
        os.close(self._out)
        os.close(self._in)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Chromium, kept for all tests of a process."""
    if BINARY is None:
        pytest.skip("no Chromium is installed")
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()
