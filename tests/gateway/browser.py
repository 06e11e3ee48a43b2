"""A real Chromium without a screen, driven by its own protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome")


class Page:
    """One tab.

    Attributes:
        faults: exceptions and errors that the page told of.
    """

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.faults: list[str] = []
        self._socket = socket
        self._number = 0

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command; return its result."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": params})
        while True:
            message = await self._socket.receive_json(timeout=60)
            if message.get("id") == self._number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.faults.append(details.get("exception", details).get("description", str(details)))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.faults.append(params["entry"]["text"])

    async def open(self, url: str) -> None:
        """Go to an address."""
        for domain in ("Runtime", "Log", "Page"):
            await self.send(f"{domain}.enable")
        await self.send("Emulation.setDeviceMetricsOverride", width=1240, height=1500,
                        deviceScaleFactor=1, mobile=False)  # fmt: skip
        await self.send("Page.navigate", url=url)

    async def value(self, script: str) -> Any:
        """Return what an expression yields, waiting for promises."""
        result = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str, seconds: float = 30.0) -> Any:
        """Wait until an expression yields something true, and return that."""
        guarded = f"(() => {{ try {{ return ({script}); }} catch {{ return null; }} }})()"
        for _ in range(int(seconds / 0.2)):
            if found := await self.value(guarded):  # while the page loads, parts are missing
                return found
            await asyncio.sleep(0.2)
        body = await self.value("document.body.innerText")
        raise AssertionError(f"{script} is not true within {seconds} s; the page says: {body}")

    async def picture(self, path: Path) -> None:
        """Save what the tab shows, PNG."""
        shot = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browsing(folder: Path) -> AsyncIterator[Page]:
    """Start a browser with an empty profile in `folder`; skips where there is none."""
    program = next((found for name in _NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"none of {', '.join(_NAMES)} is installed")
    process = await asyncio.create_subprocess_exec(
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", "--disable-background-networking", "--remote-debugging-port=0",
        f"--user-data-dir={folder}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with aiohttp.ClientSession() as session:
            address = await _address(folder / "DevToolsActivePort", session)
            async with session.ws_connect(address, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _address(path: Path, session: aiohttp.ClientSession) -> str:
    for _ in range(300):
        await asyncio.sleep(0.1)
        if not path.exists() or not (lines := path.read_text().split()):
            continue
        async with session.get(f"http://127.0.0.1:{lines[0]}/json/list") as response:
            for target in await response.json():
                if target["type"] == "page":
                    return str(target["webSocketDebuggerUrl"])
    raise AssertionError("the browser opens no tab")
