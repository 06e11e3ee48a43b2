"""The way of a request to its worker, and of the reply to its client."""
