"""Cumulative regret of recorded runs against those who knew the future, and the price's course.

``python -m benchmarks.token_pd.regret`` serves a few streams over a tight budget under each
policy, always as many at once, or as they come (``--rate``), and records what was kept after every
step. A token's return is the mean attention that the full cache's queries to come give it. Two
optima are set beside what was earned: the best set of each step (``kv/regret.py``; it may take back
what it dropped), and the best fixed choice of tokens, each kept from its birth to its request's end
or never, with the budget held in every step (the paper's maximum over x; a linear programme, solved
exactly). Printed: the exponent of the growth of both, and how long the price takes to settle after
the load has doubled.
"""

from __future__ import annotations

import argparse
from math import inf
from pathlib import Path

from benchmarks.lib.servers import machine
from pigou.runtime.resources import prepare_environment, set_threads


def main() -> None:
    """Record the runs, print the table, draw the picture."""
    args = _arguments()
    prepare_environment(1)
    set_threads(1)
    print("machine:", machine(), flush=True)
    from benchmarks.token_pd.regret_run import report

    report(args)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument(
        "--blocks", type=int, default=6, help="of the budget, for each stream, of 16 tokens"
    )
    parser.add_argument(
        "--block", type=int, choices=(1, 2, 4, 8, 16), default=16, help="tokens of the cache's own"
    )
    parser.add_argument("--rate", type=float, default=inf, help="req/s; all at once without")
    parser.add_argument("--fan", type=int, default=1, help="requests of a job, which come together")
    parser.add_argument("--policies", nargs="+", default=["fifo", "h2o", "paper", "pigou"])
    parser.add_argument("--points", type=int, default=10, help="of the fixed optimum's curve")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--picture", type=Path, default=None, help="PNG to draw")
    return parser.parse_args()


if __name__ == "__main__":
    main()
