"""Windows of load: counters in, window out. Sources: live, simulated, journal, scrape."""
