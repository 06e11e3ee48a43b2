"""The HTTP side of a worker: routes, prompts, replies, structured output."""
