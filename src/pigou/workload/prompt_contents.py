"""The prompts of a trace, for the prefix linter: by content where a trace has it, or by blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from pathlib import Path

import msgspec

from pigou.config import ConfigError
from pigou.diagnosis.prefix_lint import PrefixReport, lint_blocks, lint_prefixes, prompt_pieces
from pigou.workload.packed import unpacked
from pigou.workload.trace_formats import read_trace

#: Prompts that are compared at most, and bytes of a line.
_MAX_PROMPTS, _MAX_LINE = 20_000, 2**24


def lint_trace(path: str | Path) -> PrefixReport:
    """Lint the prompts of a file: by content where lines have texts or ids, else by blocks."""
    contents = _contents(Path(path))
    if contents is not None:
        return lint_prefixes(contents)
    trace = read_trace(path)
    prompts = [turn.blocks for session in trace.sessions for turn in session.turns if turn.blocks]
    if not prompts:
        raise ConfigError(
            f"{path} has neither texts nor blocks of prompts; nothing can be compared"
        )
    return lint_blocks(prompts[:_MAX_PROMPTS], round(trace.block))


def _contents(path: Path) -> list[Sequence[Hashable]] | None:
    prompts: list[Sequence[Hashable]] = []
    try:
        with unpacked(path) as file:
            for number, line in enumerate(file, 1):
                if len(prompts) == _MAX_PROMPTS or len(line) > _MAX_LINE:
                    break
                if not line.strip():
                    continue
                prompt = _prompt(line)
                if prompt is None:
                    if not prompts:
                        return None
                    raise ConfigError(f"line {number} of {path} has no prompt")
                prompts.append(prompt)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return prompts or None


def _prompt(line: bytes) -> Sequence[Hashable] | None:
    try:
        row = msgspec.json.decode(line)
    except (msgspec.DecodeError, RecursionError):
        return None
    if not isinstance(row, dict):
        return None
    body = row.get("body")
    return prompt_pieces(body if isinstance(body, dict) else row)
