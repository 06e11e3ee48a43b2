"""Orders to the peer's process, and its answers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import IO, Any

from benchmarks.lib.peers import kvpress_home
from benchmarks.token_eviction.task import Outcome, Prepared


class PressFailed(RuntimeError):
    """A press cannot run; the message is its own."""


class KvpressPeer:
    """kvpress in a process and an environment of its own; `close` it."""

    def __init__(self, folder: Path, *, sinks: int, recent: int, rows: int) -> None:
        """Start it.

        Args:
            folder: for its log and what it hands over.
            sinks: first entries that guarded presses keep.
            recent: last entries that they keep.
            rows: computed at once.

        Raises:
            PeerMissing: it is not installed.
        """
        self._folder = folder
        self._common = {"sinks": sinks, "recent": recent, "rows": rows}
        python = kvpress_home() / "bin" / "python"
        with (folder / "kvpress.log").open("wb") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.token_eviction.kvpress_process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=Path(__file__).parents[2],
                env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
            )

    def run(self, prepared: Prepared, press: str, most: int) -> Outcome:
        """Let a press read a task.

        Args:
            press: its name in `benchmarks.token_eviction.presses`; `full` for none.
            most: entries that it may keep.

        Raises:
            PressFailed: the press cannot.
        """
        out = self._folder / "outcome.npz"
        order = {"task": str(prepared.folder), "press": press, "most": most, "out": str(out)}
        self._ask(order | self._common)
        return Outcome.read(out)

    def names(self, prepared: Prepared) -> list[str]:
        """Return the presses that may read a task, the full cache and the oracle first."""
        found: list[str] = self._ask({"names": bool(prepared.task.whole)})["names"]
        return ["full", "oracle +window", *found]

    def close(self) -> None:
        """End the process."""
        self._pipe(self._process.stdin).close()
        self._process.terminate()
        self._process.wait()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        print(json.dumps(order), file=self._pipe(self._process.stdin), flush=True)
        line = self._pipe(self._process.stdout).readline()
        if not line:
            log = (self._folder / "kvpress.log").read_text("utf-8", errors="replace")
            raise RuntimeError(f"the peer ended: {log[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        if answer["error"] is not None:
            raise PressFailed(answer["error"])
        return answer

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe
