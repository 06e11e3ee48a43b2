"""KV transfer: blocks move from the worker that computed them to the one that decodes.

A `Sender` offers blocks under a lease, and answers with an opaque ticket; a `Receiver` pulls them
by shared memory or TCP, verifies every block, and says how many it has.
"""
