"""Reference runs: what Pigou does today, kept as files that a refactoring is compared with."""
