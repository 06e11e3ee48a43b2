"""NVIDIA Dynamo: its router under Pigou's controller, its frontends, its event plane.

Importing this package needs neither Dynamo nor the compiled parts of Pigou, so that it runs inside
Dynamo's own environment: with NumPy, msgspec, aiohttp, pyzmq and prometheus-client, which Dynamo
brings. What talks to Dynamo's runtime imports it when called (`binding`).
"""
