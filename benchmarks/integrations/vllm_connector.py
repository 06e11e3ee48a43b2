"""vLLM pairs by PigouConnector and by NixlConnector beside one server, interleaved.

    PIGOU_PEER_VLLM=DIR python -m benchmarks.integrations.vllm_connector [--rounds 10]

Both pairs share the cores, and only one is asked at a time. A round asks each contender, in an
order of its own, for one prompt that nobody has seen: the prefill leg, then the decode leg as a
stream. One server (the decode server of Pigou's pair) computes its prompt itself. MB/s are the
transfer's own: NIXL's counters, and the connector's log of pulls.
"""

from __future__ import annotations

import argparse
import json
import re
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=1500, help="prompt length, below 2,000")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--backends", default="shm,tcp")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_checkpoint(
            folder / "model",
            Shape(hidden=512, layers=args.layers, heads=8, kv_heads=2, head_dim=64, ffn=1536),
        )
        (folder / "log.json").write_text(json.dumps(LOG))
        environment = {
            "PYTHONPATH": python_path(folder / "links"),
            "VLLM_LOGGING_CONFIG_PATH": str(folder / "log.json"),
            "WAIT": "800",
        }
        extra = f"--no-enable-prefix-caching --block-size 32 --max-num-batched-tokens {args.tokens}"
        config = pigou_connector(backends=args.backends.split(","), timeout_s=20.0)
        pairs = {}
        for name, more in (("pigou", config), ("nixl", "")):
            pairs[name] = VllmPair.start(
                folder / "model", folder / name, f"{extra} {more}", 1000, environment
            )
            stack.callback(pairs[name].stop)
        legs: dict[str, Callable[[dict[str, Any]], tuple[float, float, list[int]]]] = {
            "pigou": lambda body: both_legs(pairs["pigou"], body),
            "nixl": lambda body: both_legs(pairs["nixl"], body),
            "one server": lambda body: (0.0, *decode(pairs["pigou"].decode, body)),
        }
        seen: dict[str, list[tuple[float, float]]] = {name: [] for name in legs}
        told: dict[int, list[list[int]]] = {}
        prompts = random.integers(10, 1900, (args.rounds + 1, args.tokens)).tolist()
        for number, name in shuffled_rounds(list(legs), args.rounds + 1, args.seed):
            body = {"model": "model", "prompt": prompts[number], "max_tokens": 8,
                    "temperature": 0, "ignore_eos": True, "return_token_ids": True}  # fmt: skip
            prefill_s, first_s, tokens = legs[name](body)
            told.setdefault(number, []).append(tokens)
            if number:  # the first round warms up
                seen[name].append((prefill_s, first_s))
        same = sum(all(tokens == each[0] for tokens in each) for each in told.values())
        rates = {"pigou": pigou_rate(pairs["pigou"]), "nixl": nixl_rate(pairs["nixl"])}
        print(f"{args.tokens} tokens, {args.rounds} rounds; same tokens from all in {same} of "
              f"{args.rounds + 1} prompts")  # fmt: skip
        print("contender    prefill leg   decode leg's first token P50 (P10-P90)   both   transfer")
        for name, rows in seen.items():
            prefill, first = 1e3 * np.array(rows).T
            low, mid, high = np.percentile(first, (10, 50, 90))
            rate = f"{rates[name] / 1e6:8.0f} MB/s" if name in rates else ""
            print(f"{name:11}  {np.median(prefill):8.0f} ms   {mid:8.0f} ms ({low:.0f}-{high:.0f})"
                  f"   {np.median(prefill + first):8.0f} ms {rate}")  # fmt: skip
        paired = np.array([row[1] for row in seen["nixl"]]) / [row[1] for row in seen["pigou"]]
        print(f"decode leg's first token, nixl / pigou: median {np.median(paired):.2f}")


if __name__ == "__main__":
    main()
