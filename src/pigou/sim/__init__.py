"""The simulator: the production cores under a virtual clock."""
