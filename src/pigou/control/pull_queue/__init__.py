"""Global prefill queue: prefill workers pull prompts, at a price; pure, without a clock."""
