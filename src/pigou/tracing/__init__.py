"""Traces of requests by OpenTelemetry: spans are collected as tuples, and sent from a thread."""
