"""How good a model is: perplexity, and what simpler models of the same text reach."""
