"""The worker process: HTTP, engine thread, metrics, KV events, KV transfer."""
