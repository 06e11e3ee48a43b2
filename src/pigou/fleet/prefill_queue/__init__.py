"""The prefill queue over NATS JetStream: gateways publish prompts, prefill workers pull them."""
