"""Fleets on Kubernetes: custom resources, and the operator that makes what they ask for.

Only `operator.py` needs the extra `k8s`.
"""
