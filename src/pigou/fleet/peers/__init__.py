"""Gateways of one fleet on a message bus: authenticated messages, supervised exchange."""
