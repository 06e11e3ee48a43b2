"""ControlPlane: admission, routing and prices of requests. No I/O, no clock."""
