"""What is wrong with a fleet: failure modes, their detectors, alert rules and playbooks. Pure."""
