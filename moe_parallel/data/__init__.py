"""From text to tokens, from tokens to files, from files to batches."""
