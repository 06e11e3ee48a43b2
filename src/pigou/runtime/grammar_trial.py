"""Compiles untrusted grammars in a separate process, which may crash or be killed.

llguidance recurses over rules: a long chain overflows the stack, which no handler catches. Run
`python -m pigou.runtime.grammar_trial` with JSON lines on stdin: `tokenizer` (a path), `vocab` and
`ends`, then grammars (`kind`, `source`, `flexible`); each is answered by `{"error": ...}`.
"""

from __future__ import annotations

import json
import math
import random
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from pigou.request import Grammar
from pigou.runtime.step_output import GrammarError
from pigou.runtime.structured_output import Grammars, GrammarState, WorkBudget, read_grammars

#: CPU seconds per trial; the kernel kills the process soon after.
CPU_SECONDS = 4
#: Max bytes per trial.
MEMORY = 2**30
#: Smaller than the engine thread's stack, so overflows occur here first.
_STACK = 2 * 2**20
_OUTPUTS = 2
_TOKENS = 64


def try_grammar(grammars: Grammars, grammar: Grammar) -> None:
    """Compile a grammar and sample outputs; raises GrammarError if invalid or too slow."""
    matcher = grammars.compile(grammar)
    for number in range(_OUTPUTS):
        choices = random.Random(number)
        state = GrammarState(matcher.deep_copy(), grammars.vocab, WorkBudget())
        for _ in range(_TOKENS):
            allowed = [
                int(i) for i in np.flatnonzero(state.allowed()) if i not in grammars.end_tokens
            ]
            if not allowed or state.advance(choices.choice(allowed)):
                break


def serve(lines: TextIO, answers: TextIO) -> None:
    """Answer trials until the input ends."""
    first: dict[str, Any] = json.loads(lines.readline())
    folder = Path(first["tokenizer"]).parent
    grammars = read_grammars(folder, first["vocab"], frozenset(first["ends"]))
    _limit_memory()
    for line in lines:
        _limit_cpu()
        error = None
        try:
            try_grammar(grammars, Grammar(**json.loads(line)))
        except GrammarError as refused:
            error = str(refused)
        answers.write(json.dumps({"error": error}) + "\n")
        answers.flush()


def _limit_cpu() -> None:
    used = math.ceil(time.process_time())
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + CPU_SECONDS, hard))


def _limit_memory() -> None:
    if not sys.platform.startswith("linux"):
        return
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    size = pages * resource.getpagesize() + MEMORY
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def main() -> None:
    """Serve stdin on a thread with a small stack."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK)
    thread = threading.Thread(target=serve, args=(sys.stdin, sys.stdout))
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
