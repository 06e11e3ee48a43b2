"""Training of the bundled model: its corpus, tokenizer, tasks, architecture and curriculum."""
