"""What travels between processes: OpenAI bodies, errors, SSE, KV events, transfer tickets."""
