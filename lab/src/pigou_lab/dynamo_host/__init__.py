"""NVIDIA Dynamo: its router under Pigou's controller, its frontends, its event plane.

Importing it needs neither Dynamo nor numba, so it runs inside Dynamo's own environment.
"""
