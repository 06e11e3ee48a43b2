"""The engine thread of a worker, and what passes between it and the event loop."""
