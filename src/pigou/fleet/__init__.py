"""The fleet: starts workers or finds them, watches them, and tells the gateway who is there."""
