"""NVIDIA Dynamo: router, frontends, event plane; runs inside Dynamo's own environment."""
