"""Attention over the paged KV cache: by torch, and by compiled kernels on the CPU."""
