"""The planner: how many workers each pool has. Windows in, actions out; no clock, no I/O."""
