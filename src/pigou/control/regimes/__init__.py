"""Regimes: what the router's parameters are under which load."""
