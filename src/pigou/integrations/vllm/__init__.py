"""Plug-ins that a vLLM server loads by a path in its configuration."""
