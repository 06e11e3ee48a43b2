"""Attention over the paged KV cache: by torch, or by compiled kernels on the CPU."""
