"""From text to token ids and back: tokenizer, chat template, detokenizer, stop strings."""
