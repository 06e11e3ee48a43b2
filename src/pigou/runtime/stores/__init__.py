"""The I/O of the tiers beyond the device: host memory, disk, object storage, and the moves between.

`kv/tiers.py` decides what lies where; stores put, get and delete what they are told to. Each store
serves one layout of blocks, and returns a block either as it was put or not at all. A
`KVOffloader` does the moving, on threads of its own.
"""
