"""ControlPlane: who runs where, and at what price. No I/O, no clock."""
