"""Speeds: how fast each worker prefills, transfers and decodes, learned as it works."""
