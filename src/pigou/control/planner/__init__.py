"""The planner: how many workers each pool has. Windows in, actions out; no clock, no I/O.

- ``planner``: the protocol, and the entry point of planners
- ``messages``: what a planner returns; ``pigou.windows`` has what it observes
- ``price``: Pigou's own; ``price/terms`` is the price of a worker
"""
