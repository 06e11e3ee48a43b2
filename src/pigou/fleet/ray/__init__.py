"""Ray as the engine of a fleet over many hosts; needs the extra `ray`."""
