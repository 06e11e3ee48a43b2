"""The confusion matrix of the detectors: 19 simulated faults and a healthy fleet, many seeds.

``python -m benchmarks.diagnosis.matrix --seeds 20 --first 1000`` prints, for each fault (row), in
how many seeds each mode (column) was reported as a cause. What follows from another finding is
counted apart. Thresholds were chosen on seeds below 100; judge on others.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pigou.diagnosis.diagnose import diagnose
from pigou.diagnosis.modes import MODES
from pigou_lab.experiments.fault_trials import HEALTHY, TRIALS, run_trial


def reported(trial: tuple[int, int]) -> tuple[int, list[int], list[int]]:
    """Return a trial's mode, and the modes reported as causes, and as what follows from them."""
    findings = diagnose(run_trial(*trial)).findings
    causes = [finding.number for finding in findings if not finding.follows_from]
    return trial[0], causes, [finding.number for finding in findings if finding.follows_from]


def main() -> None:
    """Run all trials and print the matrix."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first", type=int, default=1000)
    parser.add_argument("--modes", type=int, nargs="*", default=list(TRIALS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.seeds)
    trials = [(mode, seed) for mode in args.modes for seed in seeds]
    causes: dict[int, Counter[int]] = {mode: Counter() for mode in args.modes}
    follows: dict[int, Counter[int]] = {mode: Counter() for mode in args.modes}
    with ProcessPoolExecutor(args.processes) as pool:
        for mode, own, other in pool.map(reported, trials):
            causes[mode].update(own)
            follows[mode].update(other)
    _show(args.modes, causes, follows, args.seeds)
    if args.json:
        args.json.write_text(json.dumps({
            "seeds": list(seeds),
            "causes": {mode: dict(counts) for mode, counts in causes.items()},
            "follows": {mode: dict(counts) for mode, counts in follows.items()},
        }, indent=1) + "\n")  # fmt: skip


def _show(
    modes: Sequence[int], causes: dict[int, Counter[int]], follows: dict[int, Counter[int]],
    seeds: int,
) -> None:  # fmt: skip
    print("fault (row), reported as a cause (column), of", seeds, "seeds")
    print(f"{'':28}" + "".join(f"{number:>4}" for number in MODES) + "  follows")
    for mode in modes:
        name = "healthy" if mode == HEALTHY else f"{mode} {MODES[mode].name}"
        row = "".join(f"{causes[mode][number] or '.':>4}" for number in MODES)
        print(f"{name:28}{row}  {dict(sorted(follows[mode].items())) or ''}")
    hits = {mode: causes[mode][mode] for mode in modes if mode != HEALTHY}
    alarms = {
        number: sum(causes[mode][number] for mode in modes if mode != number) for number in MODES
    }
    good = sum(count >= 0.9 * seeds for count in hits.values())
    print(f"reported in at least 90% of seeds: {good} of {len(hits)} modes")
    print(
        "false alarms by mode:", {number: count for number, count in alarms.items() if count} or 0
    )


if __name__ == "__main__":
    main()
