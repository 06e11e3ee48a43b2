"""Placement of gangs on nodes by the cost of their KV transfers."""
