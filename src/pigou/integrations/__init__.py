"""Adapters to other engines and gateways: vLLM, SGLang, LMCache, Envoy, kvpress."""
