"""The models: one decoder, with the families' switches in its configuration."""
