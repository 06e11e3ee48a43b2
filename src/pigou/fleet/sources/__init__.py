"""Where members of a fleet come from: this machine, servers that others run, a registry."""
