"""Latency model: seconds of prefill, transfer and decode of each worker, learned online."""
