"""Admission: queue order, queue limits and worker capacity."""
