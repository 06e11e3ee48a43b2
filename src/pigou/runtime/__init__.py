"""The PyTorch runtime: loads a model and executes plans. No other package imports torch."""
