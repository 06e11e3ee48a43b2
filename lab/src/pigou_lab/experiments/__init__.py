"""Experiments of Georgiou (2026), "The Price of Anarchy in Disaggregated Inference", run again."""
