"""Text into tokens, tokens into files, files into batches."""
