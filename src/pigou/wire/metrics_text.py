"""Metrics pages of other processes, in the text format of Prometheus: their samples, bounded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import msgspec

#: vLLM's gauges: running and waiting requests; share of KV blocks in use, by two releases.
RUNNING, WAITING = b"vllm:num_requests_running", b"vllm:num_requests_waiting"
USAGE, OLD_USAGE = b"vllm:kv_cache_usage_perc", b"vllm:gpu_cache_usage_perc"
_CACHE_CONFIG = b"vllm:cache_config_info"
_SAMPLE = re.compile(rb"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: \d+)?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: Bytes of a page, bytes of a line, and lines that are parsed: of each engine, a handful.
_MAX_PAGE_BYTES, _MAX_LINE_BYTES, _MAX_LINES = 2**23, 2**14, 1024
#: SGLang's metrics that vLLM has by another name; all others differ by their prefix alone.
_SGLANG = re.compile(rb"^sglang:(\w+)", re.MULTILINE)
_RENAMED = {
    b"num_running_reqs": b"num_requests_running", b"num_queue_reqs": b"num_requests_waiting",
    b"token_usage": b"kv_cache_usage_perc", b"cached_tokens_total": b"prefix_cache_hits_total",
}  # fmt: skip
#: Digits that a number of a cache has fewer than: any such fits 31 bits.
_DIGITS = 10


def vllm_names(page: bytes) -> bytes:
    """Return a page of SGLang, or of TensorRT-LLM's iterations, as a page of vLLM; others as is."""
    if b"sglang:" in page:
        return _SGLANG.sub(lambda match: b"vllm:" + _RENAMED.get(match[1], match[1]), page)
    if not page.startswith(b"[{"):
        return page
    try:
        last = msgspec.json.decode(page)[-1]
        cache = last.get("kvCacheStats") or {}
        blocks, used = cache.get("maxNumBlocks", 0), cache.get("usedNumBlocks", 0)
        return (
            b"%s %d\n%s %d\n%s %f\nvllm:iterations_total %d\n"
            b'%s{block_size="%d",num_gpu_blocks="%d"} 1\n'
        ) % (
            RUNNING, last["numActiveRequests"], WAITING, last.get("numQueuedRequests", 0),
            USAGE, used / max(1, blocks), last.get("iter", 0),
            _CACHE_CONFIG, cache.get("tokensPerBlock", 0), blocks,
        )  # fmt: skip
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError,
            ArithmeticError, RecursionError):  # fmt: skip
        return b""


def lines(page: bytes, names: tuple[bytes, ...], max_bytes: int = _MAX_PAGE_BYTES) -> list[bytes]:
    """Return the lines of a page that begin with one of the names."""
    page = vllm_names(page[:max_bytes])
    return [line for line in page.splitlines() if line.startswith(names)]


def samples(
    page: bytes, names: tuple[bytes, ...], max_lines: int = _MAX_LINES
) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Yield name, labels and value of these metrics' samples among the first matching lines."""
    for line in lines(page, names)[:max_lines]:
        match = _SAMPLE.fullmatch(line) if len(line) <= _MAX_LINE_BYTES else None
        if match is not None and match[1] in names:
            yield match[1], match[2] or b"", match[3]


def all_samples(page: bytes, max_bytes: int) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield name, labels and value of all samples; malformed lines are skipped."""
    for line in vllm_names(page[:max_bytes]).splitlines():
        match = None if line.startswith(b"#") else _SAMPLE.fullmatch(line)
        if match is not None:
            try:
                value = float(match[3])
            except ValueError:
                continue
            yield match[1].decode(), labels(match[2] or b""), value


def labels(text: bytes) -> dict[str, str]:
    """Return the labels of a sample; their values stay escaped."""
    return dict(_LABEL.findall(text.decode(errors="replace")))


def totals(
    page: bytes, names: tuple[bytes, ...], max_lines: int = _MAX_LINES
) -> dict[bytes, float]:
    """Return each metric over all engines: the sum, for `USAGE` the mean; bad values count 0."""
    values: dict[bytes, list[float]] = {}
    for name, _, text in samples(page, names, max_lines):
        values.setdefault(name, []).append(number(text))
    return {
        name: sum(of_engines) / (len(of_engines) if name in (USAGE, OLD_USAGE) else 1)
        for name, of_engines in values.items()
    }


def number(text: bytes) -> float:
    """Return a finite number of at least 0; 0 for all else."""
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if math.isfinite(value) and value > 0 else 0.0


def cache_config(page: bytes) -> dict[str, int]:
    """Return `block_size` and `num_gpu_blocks` (of all engines), as far as a page tells them."""
    info: dict[str, int] = {}
    for _, text, _ in samples(page, (_CACHE_CONFIG,)):
        values = labels(text)
        for name in ("block_size", "num_gpu_blocks"):
            value = values.get(name, "")
            if value.isascii() and value.isdigit() and len(value) < _DIGITS:
                before = info.get(name, 0) if name == "num_gpu_blocks" else 0
                info[name] = int(value) + before
    return info
