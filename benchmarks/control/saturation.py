"""Detectors of saturation beside one another: delay, false alarms, time spent in error.

    PIGOU_SHARED=DIR python -m benchmarks.control.saturation [--seeds 3] [--only TITLE]

Load is Poisson (steady, steps, a ramp, bursts) or recorded (Azure, Mooncake: arrival times and
token counts as they are), on a fleet of 4 servers, first come first served (M/G/c; least work left,
which is the same). Service takes 20 ms and 0.2 ms a token, times lognormal noise of 10 %; on
recorded load the time of a token is what makes the utilisation.

Truth: the fleet queues where requests wait for one mean service time, as a mean over the arrivals
of 45 services (10 s on generated load) about that moment, and one imagined each second; gaps under
1.5 such windows are closed. An episode counts when it lasts a window. An alarm is Transition or
more; it is false when it begins a window or more away from any queueing. Delay counts from the
beginning of an episode, and back to Below from its end.

What each detector is told beforehand: `cusum` nothing. `paper` 4 times the P99 of the fleet at 20 %
of its capacity, as the paper advises. Those marked "tuned" the highest value that their signal had
in an hour at 50 %, which is as much as to say one false alarm an hour there. `config-variance` runs
on a fleet of its own, that sends each request by a random temperature of the paper's four.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from benchmarks.control.saturation_load import (
    HOUR,
    Load,
    Run,
    at_rest,
    bursts,
    intervals,
    longer,
    ramp,
    recorded,
    shared,
    simulate,
    slower,
    steady,
    step,
)
from pigou.control.saturation.cusum_detector import CusumDetector
from pigou.control.saturation.regime import Detector, TTFTSample
from pigou.request import SECOND
from pigou_lab.detectors import (
    PRESETS,
    ConfigVariance,
    ConfigVarianceConfig,
    PaperConfig,
    PaperDetector,
    SecondDifference,
    SecondDifferenceConfig,
)


def observe(detector: Detector, run: Run) -> NDArray[np.int64]:
    """Level (0, 1, 2) that the detector says at the end of each second."""
    levels = np.zeros(len(run.truth), dtype=np.int64)
    at = 0
    for second in range(len(levels)):
        limit = (second + 1) * SECOND
        while at < len(run.events) and run.events[at][0] <= limit:
            detector.update(*run.events[at])
            at += 1
        levels[second] = detector.tick(limit, int(run.pending[second])).level
    return levels


@dataclass
class Score:
    """Sums over runs."""

    rise: list[float] = field(default_factory=list)
    fall: list[float] = field(default_factory=list)
    missed: int = 0
    stuck: int = 0
    false: int = 0
    clear: int = 0
    on_clear: int = 0
    queueing: int = 0
    off_queueing: int = 0

    def add(self, run: Run, levels: NDArray[np.int64]) -> None:
        """Count what a detector said of a run."""
        on, truth = levels > 0, run.truth
        near = np.convolve(truth, np.ones(2 * run.window + 1), mode="same") > 0
        self.false += sum(not near[start] for start, _ in intervals(on))
        self.clear += int((~truth).sum())
        self.on_clear += int((on & ~truth).sum())
        self.queueing += int(truth.sum())
        self.off_queueing += int((~on & truth).sum())
        found = intervals(truth)
        for index, (start, end) in enumerate(found):
            after = found[index + 1][0] if index + 1 < len(found) else len(on)
            if end - start < run.window:
                continue
            hits = np.flatnonzero(on[start:end])
            if not hits.size:
                self.missed += 1
                continue
            # An alarm that was up before the episode began counts as no delay.
            self.rise.append(float(hits[0]))
            gone = np.flatnonzero(~on[end:after])
            if gone.size:
                self.fall.append(float(gone[0]))
            elif after - end > run.window:
                self.stuck += 1

    def row(self) -> list[str]:
        """The cells of the table, after the name."""

        def middle(values: list[float]) -> str:
            return f"{np.median(values):.0f} / {np.quantile(values, 0.9):.0f}" if values else "-"

        hours = max(self.clear / HOUR, 1e-9)
        share = 100 * self.on_clear / max(self.clear, 1)
        off = f"{100 * self.off_queueing / self.queueing:.1f}" if self.queueing else "-"
        episodes = len(self.rise) + self.missed
        return [
            middle(self.rise), f"{self.missed} of {episodes}" if episodes else "-",
            middle(self.fall), str(self.stuck), f"{self.false / hours:.1f}", f"{share:.1f}", off,
        ]  # fmt: skip


# Detectors


@dataclass(frozen=True)
class Contender:
    """A detector, and what it is shown."""

    name: str
    make: Callable[[], Detector]
    explore: bool = False
    blind: bool = False  # does not know who was ahead of a request


def highest(make: Callable[[], Detector], run: Run) -> float:
    """The highest value of a detector's signal over a run, its first minute left out."""
    detector, most = make(), 0.0
    for now, sample in run.events:
        detector.update(now, sample)
        if now > 60 * SECOND and detector.signal > most:
            most = detector.signal
    return most


def contenders(light: Run, half: Run, exploring: Run) -> list[Contender]:
    huge = 1e9
    p99 = float(np.quantile([sample.ttft for _, sample in light.events], 0.99))
    smooth = highest(lambda: PaperDetector(PaperConfig(theta1=huge, theta2=2 * huge)), half)
    bend = highest(
        lambda: SecondDifference(SecondDifferenceConfig(theta1=huge, theta2=2 * huge)), half
    )
    spread = highest(
        lambda: ConfigVariance(ConfigVarianceConfig(theta1=huge, theta2=2 * huge)), exploring
    )
    return [
        Contender("cusum", CusumDetector),
        Contender("cusum, blind to queues", CusumDetector, blind=True),
        Contender("paper", lambda: PaperDetector(PaperConfig.of_baseline(p99))),
        Contender("paper, tuned", lambda: PaperDetector(
            PaperConfig(theta1=smooth, theta2=7 * smooth, margin=0.1 * smooth))),
        Contender("paper, its 70B values", lambda: PaperDetector(PRESETS["llama-3.1-70b"])),
        Contender("second-difference, tuned", lambda: SecondDifference(
            SecondDifferenceConfig(theta1=bend, theta2=7 * bend))),
        Contender("config-variance, tuned", lambda: ConfigVariance(
            ConfigVarianceConfig(theta1=spread, theta2=7 * spread)), explore=True),
    ]  # fmt: skip


def blinded(run: Run) -> Run:
    events = [
        (now, TTFTSample(each.ttft, each.tokens, each.load, None, each.setting))
        for now, each in run.events
    ]
    return Run(events, run.truth, run.window, run.pending)


HEAD = (
    "detector", "rise s, p50 / p90", "missed", "fall s, p50 / p90", "stuck", "false/h",
    "on while clear %", "off while queueing %",
)  # fmt: skip


def table(title: str, loads: Sequence[tuple[Load, int]], fleet: list[Contender]) -> None:
    scores = {each.name: Score() for each in fleet}
    queueing = total = 0
    for load, seed in loads:
        plain, wide = simulate(load, seed), simulate(load, seed, explore=True)
        dark = blinded(plain)
        queueing, total = queueing + int(plain.truth.sum()), total + len(plain.truth)
        for each in fleet:
            run = wide if each.explore else dark if each.blind else plain
            scores[each.name].add(run, observe(each.make(), run))
    print(f"\n{title} (queueing {100 * queueing / total:.0f} % of the time)\n")
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for each in fleet:
        print("| " + " | ".join([each.name, *scores[each.name].row()]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="run tables whose title contains this")
    args = parser.parse_args()
    seeds = range(args.seeds)

    def show(title: str, make: Callable[[int], Load], fleet: list[Contender]) -> None:
        if args.only in title:
            table(title, [(make(seed), seed) for seed in seeds], fleet)

    fleet = contenders(
        simulate(steady(0.2, HOUR)(901), 901),
        simulate(steady(0.5, HOUR)(902), 902),
        simulate(steady(0.5, HOUR)(902), 902, explore=True),
    )
    for level in (0.3, 0.5, 0.7, 0.8, 0.9):
        show(f"steady at {level}", steady(level), fleet)
    for level in (1.1, 1.3, 2.0):
        show(f"step from 0.5 to {level} for 120 s", step(level), fleet)
    show("ramp from 0.4 to 1.3 in 300 s, and back", ramp, fleet)
    show("bursts of 20 s at 1.5, 60 s at 0.4", bursts, fleet)
    show("prompts 4 times as long, load 0.5", longer, fleet)
    show("service 3 times as slow, load 0.5", slower, fleet)
    if shared() is None:
        print("\nPIGOU_SHARED is not set: no recorded load")
        return
    for name in ("azure", "mooncake"):
        for level in (0.5, 0.7, 0.85):
            # Speed differs from level to level, so each has fleets at rest of its own.
            own = contenders(
                at_rest(name, level, 0.2),
                at_rest(name, level, 0.5),
                at_rest(name, level, 0.5, explore=True),
            )
            loads = [(recorded(name, level), seed) for seed in seeds]
            if args.only in name:
                table(f"{name} at {level}", loads, own)


if __name__ == "__main__":
    main()
