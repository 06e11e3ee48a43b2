"""Decoder-only models: weights, layers, rotary embedding."""
