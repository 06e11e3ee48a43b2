"""What a load that is pushed after each step does to routing, against one polled each second.

    python -m benchmarks.integrations.staleness [--rates 20,40,50] [--seeds 3] [--seconds 30]

Four simulated H100 workers of Llama 3.1 8B, Poisson arrivals of 2,048 tokens in and 256 out; load
reports each 1,000 ms and each 20 ms, pairwise by seed. `toll` and `least-loaded` count the
gateway's own requests; `llm-d-blend` scores what workers report. Of two gateways without exchange,
each counts half of the requests.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

from pigou.cli import main as pigou

EVERY_MS = (1000, 20)


def ttft(options: list[str], folder: Path, every_ms: int) -> tuple[float, float]:
    """Simulate; return mean and P99 of the TTFT, in seconds."""
    fleet, figures = folder / f"{every_ms}.yaml", folder / "figures.json"
    signals = f"signals: {{report_every_ms: {every_ms}}}"
    fleet.write_text(f"workers: [{{role: both, count: 4}}]\n{signals}\n")
    sys.argv = ["pigou", "simulate", "--model", "llama-3.1-8b", "--gpu", "H100", "--blocks", "6000"]
    sys.argv += ["--fleet", str(fleet), "--json", str(figures), *options]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        pigou()
    found = json.loads(figures.read_text())["ttft_s"]
    figures.unlink()
    return found["mean"], found["p99"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rates", default="20,40,50")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=int, default=30)
    asked = parser.parse_args()
    print(
        "gateways  policy         requests/s   mean TTFT, 1 s -> 20 ms    P99, 1 s -> 20 ms   (s)"
    )
    with tempfile.TemporaryDirectory() as folder:
        for gateways in ("1", "2,exchanges=false"):
            for policy in ("toll", "least-loaded", "llm-d-blend"):
                for rate in asked.rates.split(","):
                    load = f"poisson:rate={rate},in=2048,out=256,hold={asked.seconds}"
                    pairs = []
                    for seed in range(21, 21 + asked.seeds):
                        options = ["--policy", policy, "--seed", str(seed), "--workload", load]
                        options += ["--gateways", gateways]
                        pairs.append([ttft(options, Path(folder), every) for every in EVERY_MS])
                    old, new = (
                        [statistics.mean(pair[which][part] for pair in pairs) for part in (0, 1)]
                        for which in (0, 1)
                    )
                    print(
                        f"{gateways[:1]:9} {policy:14} {rate:>10} {old[0]:13.3f} -> {new[0]:.3f}"
                        f"{old[1]:17.3f} -> {new[1]:.3f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
