"""Reports of a run: routing statistics, metrics.jsonl, console, TensorBoard, W&B."""
