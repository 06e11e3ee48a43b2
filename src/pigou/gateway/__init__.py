"""The gateway process: OpenAI routes in front of a fleet, two legs, migration, keys, limits."""
