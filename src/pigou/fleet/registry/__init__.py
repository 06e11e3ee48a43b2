"""The registry of a fleet over several hosts: workers register themselves, gateways discover."""
