"""Keys, tenure, and the guard before all routes."""
