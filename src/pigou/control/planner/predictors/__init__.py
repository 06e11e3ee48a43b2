"""Load predictors: forecasts of a series of loads, with bounds."""
