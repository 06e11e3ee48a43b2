"""Load predictors to compare with: fitted by a library, seasonal, and Kalman filters."""
