"""vLLM pairs by PigouConnector and by NixlConnector, each interleaved with one server.

    PIGOU_PEER_VLLM=DIR python -m benchmarks.integrations.vllm_connector [--rounds 10]

Two pairs at once are more than a small machine has memory for: they run after each other, in
`--turns`. A round asks a pair (prefill leg, then decode leg as a stream) and its decode server
alone for one prompt that nobody has seen, in an order of its own; the ratio of both is paired.
MB/s are the transfer's own: NIXL's counters, and the connector's log of pulls.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.lib.peers import VllmPair, pigou_connector, python_path
from benchmarks.lib.rounds import shuffled_rounds
from tools.make_random_checkpoint import Shape, write_checkpoint

ASK = {"do_remote_decode": True, "do_remote_prefill": False}
LOG = {
    "version": 1,
    "handlers": {"out": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}},
    "loggers": {
        "vllm": {"handlers": ["out"], "level": "INFO", "propagate": False},
        "vllm.pigou": {"level": "DEBUG"},
    },
}
#: One a prompt.
Rows: TypeAlias = NDArray[np.float64]
PULL = re.compile(r"pull of \S+: ok, (\d+) bytes in ([\d.]+) s by (\w+)")


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(
        url + "/v1/completions", data, {"content-type": "application/json"}
    )
    return urllib.request.urlopen(request, timeout=300)


def decode(url: str, body: dict[str, Any]) -> tuple[float, list[int]]:
    """Stream a completion; return the seconds to its first token, and all tokens."""
    began, first_s = time.perf_counter(), 0.0
    tokens: list[int] = []
    with post(url, {**body, "stream": True}) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                first_s = first_s or time.perf_counter() - began
                tokens += json.loads(line[6:])["choices"][0].get("token_ids") or []
    return first_s, tokens


def both_legs(pair: VllmPair, body: dict[str, Any]) -> tuple[float, float, list[int]]:
    """Return the seconds of the prefill leg and of the decode leg's first token, and tokens."""
    began = time.perf_counter()
    with post(pair.prefill, {**body, "max_tokens": 1, "kv_transfer_params": ASK}) as reply:
        params = json.load(reply)["kv_transfer_params"]
    prefill_s = time.perf_counter() - began
    return prefill_s, *decode(pair.decode, {**body, "kv_transfer_params": params})


def nixl_rate(pair: VllmPair) -> float:
    """Return bytes/s of a decode server's NIXL reads."""
    with urllib.request.urlopen(pair.decode + "/metrics", timeout=30) as reply:
        text = reply.read().decode()
    moved, seconds = (
        sum(float(value) for value in re.findall(rf"^{name}_sum\S* (\S+)$", text, re.M))
        for name in ("vllm:nixl_bytes_transferred", "vllm:nixl_xfer_time_seconds")
    )
    return moved / max(seconds, 1e-9)


def pigou_rate(pair: VllmPair) -> float:
    """Return bytes/s of a decode server's pulls, but for the first, which connects."""
    pulls = PULL.findall((pair.run_dir / "decode.log").read_text(errors="replace"))[1:]
    return sum(int(moved) for moved, _, _ in pulls) / max(sum(float(s) for _, s, _ in pulls), 1e-9)


def ask(pair: VllmPair, rounds: int, size: int, seed: int) -> tuple[Rows, int]:
    """Return (prefill leg, decode leg's first token, first token of one server) s, and matches."""
    prompts = np.random.default_rng(seed).integers(10, 1900, (rounds + 1, size)).tolist()
    rows, same, seen = np.zeros((rounds + 1, 3)), 0, dict[int, list[int]]()
    for number, name in shuffled_rounds(("pair", "one"), rounds + 1, seed):
        body = {"model": pair.model, "prompt": prompts[number], "max_tokens": 8,
                "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
        if name == "pair":
            rows[number, 0], rows[number, 1], tokens = both_legs(pair, body)
        else:
            rows[number, 2], tokens = decode(pair.decode, body)
        same += seen.setdefault(number, tokens) == tokens
    return rows[1:], same - rounds - 1  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="prompts a turn")
    parser.add_argument("--turns", type=int, default=1, help="starts of each pair")
    parser.add_argument("--tokens", type=int, default=1500, help="prompt length, below 2,000")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--backends", default="shm,tcp")
    args = parser.parse_args()
    config = pigou_connector(backends=args.backends.split(","), timeout_s=20.0)
    told: dict[str, list[Rows]] = {"pigou": [], "nixl": []}
    rates: dict[str, list[float]] = {"pigou": [], "nixl": []}
    print(
        "pair    prefill leg   decode leg's first token P50 (P10-P90)   one server   ratio   same"
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = Shape(hidden=512, layers=args.layers, heads=8, kv_heads=2, head_dim=64, ffn=1536)
        write_checkpoint(folder / "model", shape)
        (folder / "log.json").write_text(json.dumps(LOG))
        environment = {
            "PYTHONPATH": python_path(folder / "links"),
            "VLLM_LOGGING_CONFIG_PATH": str(folder / "log.json"),
            "WAIT": "800",
        }
        extra = f"--no-enable-prefix-caching --block-size 32 --max-num-batched-tokens {args.tokens}"
        for turn in range(args.turns):
            for kind, more in (("pigou", config), ("nixl", "")):
                pair = VllmPair.start(
                    folder / "model", folder / f"{kind}{turn}", f"{extra} {more}", 1000, environment
                )
                try:
                    rows, same = ask(pair, args.rounds, args.tokens, turn)
                    rates[kind].append(pigou_rate(pair) if kind == "pigou" else nixl_rate(pair))
                finally:
                    pair.stop()
                told[kind].append(rows)
                prefill, first, alone = 1e3 * rows.T
                low, mid, high = np.percentile(first, (10, 50, 90))
                print(f"{kind:6}{np.median(prefill):9.0f} ms  {mid:9.0f} ms ({low:.0f}-{high:.0f})"
                      f"{np.median(alone):9.0f} ms   {np.median(first / alone):.3f}   "
                      f"{same} of {args.rounds + 1}", flush=True)  # fmt: skip
    for kind, turns in told.items():
        ratio = np.concatenate([rows[:, 1] / rows[:, 2] for rows in turns])
        print(f"{kind}: decode leg's first token / one server's: {np.median(ratio):.3f}; "
              f"transfer {np.mean(rates[kind]) / 1e6:.0f} MB/s")  # fmt: skip


if __name__ == "__main__":
    main()
