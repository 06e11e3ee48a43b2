"""Admission: who of the waiting goes next, who may wait at all, and what a worker may be given."""
