"""Load predictors: what a series of loads will be, and how far off that may be."""
