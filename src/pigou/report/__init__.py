"""Tables and plots of runs: one page that needs nothing else, and pictures."""
