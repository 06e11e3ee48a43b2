"""KV transfer from prefill to decode workers.

A `Sender` offers blocks under a lease and returns an opaque ticket; a `Receiver` pulls and verifies
them by NIXL, shared memory or TCP.
"""
