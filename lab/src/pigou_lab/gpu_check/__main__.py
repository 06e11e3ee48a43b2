"""Entry point of `python -m pigou_lab.gpu_check`."""

from __future__ import annotations

import argparse
import faulthandler
import importlib.util
import sys
import time

#: Exit codes: everything held, something did not, there is no CUDA to check.
OK, FAILED, NO_CUDA = 0, 1, 3
_GRACE_S = 30


def main(arguments: list[str] | None = None) -> int:
    """Check a GPU; returns the exit code."""
    options = _parse(arguments)
    if importlib.util.find_spec("torch") is None:
        print("gpu_check: torch is not installed; install a CUDA build of it first")
        return NO_CUDA
    from pigou_lab.gpu_check.sections import Check
    from pigou_lab.gpu_check.speed import describe

    device = describe(options.device)
    if device is None:
        print(
            f"gpu_check: torch finds no CUDA device for {options.device!r}: nothing was checked. "
            "It needs an NVIDIA driver and a CUDA build of torch."
        )
        return NO_CUDA
    # A GPU that hangs must not hang this: after the budget all stacks are printed, and it ends.
    faulthandler.dump_traceback_later(options.budget + _GRACE_S, exit=True, file=2)
    try:
        print(f"device     {device}")
        check = Check(
            options.device, small=options.small, deadline=time.monotonic() + options.budget
        )
        return OK if check.run(tests=not options.skip_tests) else FAILED
    finally:
        faulthandler.cancel_dump_traceback_later()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m pigou_lab.gpu_check",
        description="Check that the runtime works on a GPU, and measure it. Exit code 0: all "
        "held; 1: something did not; 3: there is no CUDA.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N; cpu tries the check itself")
    parser.add_argument("--budget", type=float, default=420.0, help="seconds in all")
    parser.add_argument("--small", action="store_true", help="a tiny model instead of 0.6B")
    parser.add_argument(
        "--skip-tests", action="store_true", help="leave out the tests that are marked gpu"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
