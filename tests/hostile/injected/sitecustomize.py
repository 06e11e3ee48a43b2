"""Python imports this at its start; it puts the fault into workers alone."""

import sys

if "worker" in sys.orig_argv:
    from tests.hostile.faults import inject

    inject()
