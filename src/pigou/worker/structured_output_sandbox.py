"""The process in which grammars are tried before the engine's process compiles them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from pathlib import Path

from pigou.runtime.step_output import GrammarError
from pigou.sampling import Grammar

#: Seconds of one trial, where the system does not end it for its CPU time.
TRIAL_SECONDS = 60.0


class GrammarSandbox:
    """Tries grammars in a child process; starts it anew after a crash.

    Not for several threads, but for `kill`.
    """

    def __init__(self, tokenizer: Path, vocab: int, end_tokens: frozenset[int]) -> None:
        self._first = {"tokenizer": str(tokenizer), "vocab": vocab, "ends": sorted(end_tokens)}
        self._process: subprocess.Popen[str] | None = None
        self._killed: subprocess.Popen[str] | None = None
        self._closed = False
        self.started = 0

    def try_grammar(self, grammar: Grammar) -> None:
        """Compile a grammar and draw outputs from it, elsewhere.

        Raises:
            GrammarError: it is faulty, takes too long, or crashes what compiles it.
        """
        process = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(TRIAL_SECONDS, process.kill)
        timer.daemon = True
        timer.start()
        try:
            fields = {name: getattr(grammar, name) for name in Grammar.__dataclass_fields__}
            process.stdin.write(json.dumps(fields) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        finally:
            timer.cancel()
        if not answer:
            self._end(process)
            raise GrammarError(
                f"{grammar.kind}: compiling it took too long, too much memory or too deep a "
                "recursion: make it smaller"
            )
        error = json.loads(answer)["error"]
        if error is not None:
            raise GrammarError(error)

    def kill(self) -> None:
        """End the process, and with it the trial under way; from any thread."""
        process = self._process
        if process is not None:
            self._killed = process
            process.kill()

    def close(self) -> None:
        """End the process for good; from any thread."""
        self._closed = True
        self.kill()

    def _running(self) -> subprocess.Popen[str]:
        if self._closed:
            raise GrammarError("this worker is shutting down")
        process = self._process
        if process is not None:
            # A process that was killed may look alive for a moment.
            if process is not self._killed and process.poll() is None:
                return process
            self._end(process)
        process = subprocess.Popen(
            [sys.executable, "-m", "pigou.runtime.grammar_trial"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._process = process
        self.started += 1
        assert process.stdin is not None
        process.stdin.write(json.dumps(self._first) + "\n")
        process.stdin.flush()
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        _reap(process)
        self._process = None


def _reap(process: subprocess.Popen[str]) -> None:
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was to be written has nobody to read it
                pipe.close()
