"""Gateway process: OpenAI routes over a fleet, with disaggregation, migration, keys and limits."""
