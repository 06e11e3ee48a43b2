"""The life of one request: a pure state machine that the gateway and the simulator drive."""
