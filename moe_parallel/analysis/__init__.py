"""Tables and pictures from the files of a run; nothing here imports training."""
