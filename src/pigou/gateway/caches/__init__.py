"""Caches above the engine, within tenure: answers, tools, retrieval, embeddings and contexts."""
