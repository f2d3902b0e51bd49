"""Measures of a trained model: its loss on text, simple baselines, and probes of its routing."""
