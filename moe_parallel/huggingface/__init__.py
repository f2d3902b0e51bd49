"""Models of Hugging Face's transformers: their configurations and tensors, to and from ours."""
