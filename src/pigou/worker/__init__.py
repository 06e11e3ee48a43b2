"""The worker process: HTTP, the engine thread, metrics, KV events, KV transfer."""
