"""The planner: how many workers each pool has. Windows in, actions out; no clock, no I/O.

- ``messages``: what a planner observes and returns
- ``objectives``: objectives, budgets and times that it is given
- ``planner``: the protocol, and the entry point of planners
- ``performance``: latency of a pool by its load, and replicas for a load
- ``static``: pools of a fixed size
- ``price``: Pigou's own, which prices a GPU-second
"""
