"""Measures of a trained model: its loss on text, and probes of its routing."""
