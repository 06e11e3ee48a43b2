"""Proxy: carries a request to its worker, and the reply to its client."""
