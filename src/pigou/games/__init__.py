"""The theory: three games, their equilibria, optima and prices. Pure functions, no clock.

- ``congestion``: who joins which worker, and what that costs the others
- ``latency``: the cost law of a worker, and its fit from observations
- ``caching``: who holds which block, in which tier
- ``allocation``: how many GPUs prefill, how many decode
- ``anarchy``: observed cost over optimal cost, from a live fleet
- ``queueing``: waits and knees of the textbook queues

``docs/internals/theory.md`` has the results, and the counterexamples to what is commonly claimed.
"""
