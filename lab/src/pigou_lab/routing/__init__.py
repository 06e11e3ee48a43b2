"""Other systems' routing policies, rebuilt from their sources: one file a system."""
