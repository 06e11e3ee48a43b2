"""Fleets on Kubernetes: custom resources and operator (`operator.py` needs extra `k8s`)."""
