"""Work to send to a fleet, and work whose answers are known."""
