"""What tokens in, tokens out saves before a real vLLM: CPU per request, and time to first token.

    python -m benchmarks.integrations.tokens [--rounds 6] [--requests 12] [--prompt 8000]
                                             [--output 64]

One vLLM for CPU (`PIGOU_PEER_VLLM`) with `--enable-scale-out`, and two gateways before it: one
sends text, one token ids. Each contender (vLLM itself too) has its turn in each round, in an order
that is drawn anew. Prompts share their beginning, which vLLM has cached: what is left is
tokenizing, sending and showing. CPU is that of the gateway's process and of vLLM's API server.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import psutil

from benchmarks.lib.peers import start_vllm
from benchmarks.lib.rounds import shuffled_rounds
from benchmarks.lib.servers import (
    LOOPBACK,
    Server,
    available_cores,
    free_ports,
    machine,
    post_json,
    unwind_on_terminate,
)
from tools.make_random_checkpoint import Shape, write_checkpoint

WORDS = ["road", "toll", "city", "cache", "price", "queue", "block", "token", "river", "worker"]


def gateway(vllm: Server, log: Path, as_tokens: bool) -> Server:
    """Start a gateway that sends token ids, or text."""
    port = free_ports(1)[0]
    argv = [sys.executable, "-m", "pigou", "serve", "--attach", vllm.url, "--port", str(port)]
    argv += ["--policy", "toll", "--token-endpoint" if as_tokens else "--no-token-endpoint"]
    return Server(argv, url=f"http://{LOOPBACK}:{port}", log=log)


def ttft_s(url: str, model: str, prompt: str, output: int) -> float:
    """Stream one completion; return the seconds to its first chunk."""
    body = {"model": model, "prompt": prompt, "max_tokens": output, "temperature": 0,
            "ignore_eos": True, "stream": True}  # fmt: skip
    data, kind = json.dumps(body).encode(), {"content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/completions", data, kind)
    began, first = time.perf_counter(), 0.0
    with urllib.request.urlopen(request, timeout=300) as reply:
        for _ in reply:
            first = first or time.perf_counter() - began
    return first


def cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, default in (("rounds", 6), ("requests", 12), ("prompt", 8000), ("output", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    unwind_on_terminate()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "tiny"
        write_checkpoint(model, Shape(rope_theta=10_000.0, max_len=32_768))
        vllm = start_vllm(
            model, log=folder / "vllm.log", cores=available_cores(), block_size=32,
            max_model_len=options.prompt * 2, extra=["--enable-scale-out"],
        )  # fmt: skip
        stack.enter_context(vllm).wait_healthy()
        servers = {"vLLM": vllm}
        for name in ("text", "tokens"):
            server = gateway(vllm, folder / f"{name}.log", name == "tokens")
            servers[name] = stack.enter_context(server).wait_healthy()
        measure(servers, model.name, options)


def measure(servers: dict[str, Server], model: str, options: argparse.Namespace) -> None:
    """Give each contender its turns; print medians over rounds."""
    api = servers["vLLM"].pid
    begun, number = " ".join(WORDS[i * i % 10] for i in range(options.prompt)), 0
    asked = {"model": model, "prompt": begun}
    size = post_json(servers["vLLM"].url + "/tokenize", asked)["count"]
    begun = begun[: len(begun) * options.prompt // size]
    for server in servers.values():
        ttft_s(server.url, model, begun, 2)
    seen: dict[str, dict[str, list[float]]] = {
        name: {"api": [], "own": [], "ttft": []} for name in servers
    }
    for _, name in shuffled_rounds(list(servers), options.rounds, 0):
        server = servers[name]
        before = cpu_s(api), cpu_s(server.pid)
        for _ in range(options.requests):
            number += 1
            first = ttft_s(server.url, model, f"{begun} {number}", options.output)
            seen[name]["ttft"].append(first)
        seen[name]["api"].append((cpu_s(api) - before[0]) / options.requests)
        seen[name]["own"].append((cpu_s(server.pid) - before[1]) / options.requests)
    print(machine())
    print(
        f"{'':8}{'API server':>14}{'gateway':>12}{'both':>10}{'TTFT P50':>12}   (ms; CPU a request)"
    )
    rows = {}
    for name, figures in seen.items():
        api_ms, own_ms = (1e3 * statistics.median(figures[key]) for key in ("api", "own"))
        own_ms = 0.0 if name == "vLLM" else own_ms
        first_ms = 1e3 * statistics.median(figures["ttft"])
        rows[name] = api_ms, own_ms, api_ms + own_ms, first_ms
        print(f"{name:8}{api_ms:14.1f}{own_ms:12.1f}{api_ms + own_ms:10.1f}{first_ms:12.1f}")
    pairs = zip(rows["text"], rows["tokens"], strict=True)
    ratios = "   ".join(f"{old / new:.2f}" for old, new in pairs)
    print(f"text / tokens: {ratios}")
    added = {name: rows[name][3] - rows["vLLM"][3] for name in ("text", "tokens")}
    print(f"added TTFT: text {added['text']:+.1f} ms, tokens {added['tokens']:+.1f} ms")


if __name__ == "__main__":
    main()
