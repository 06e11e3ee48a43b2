"""Stores for KV blocks beyond the device (host memory, disk, object storage) and their transfers.

`kv/tiers.py` decides placement. Stores only put, get and delete; `KVOffloader` moves blocks on its
own threads.
"""
