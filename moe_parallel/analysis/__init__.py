"""Tables and figures from the files of a run. Nothing here imports training."""
