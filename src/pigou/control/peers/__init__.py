"""Several gateways on one fleet: what they tell one another, and how it enters a ControlPlane."""
