"""Several gateways on one fleet: messages between them, and their effect on a ControlPlane."""
