"""Who may ask: keys, tenure, and the guard before all routes."""
