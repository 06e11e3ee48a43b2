"""Failure modes of a fleet and their detectors. Pure."""
