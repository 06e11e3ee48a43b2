"""OpenTelemetry request traces: spans are collected as tuples and sent from a thread."""
