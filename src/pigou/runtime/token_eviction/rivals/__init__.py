"""Rivals."""
