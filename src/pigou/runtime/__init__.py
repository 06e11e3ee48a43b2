"""The PyTorch runtime: loads a model and computes plans. No other package imports torch."""
