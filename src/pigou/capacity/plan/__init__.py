"""Which fleet to take for a workload: an analytic pass over many, simulation of the best."""
