"""Other systems' planners, rebuilt from their published rules: one file a system."""
