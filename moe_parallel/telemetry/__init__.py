"""What a run shows of itself: routing statistics, metrics.jsonl, console, TensorBoard, W&B."""
