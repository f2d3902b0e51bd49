"""Checkpoints: what is in them, how they are written, published, found, judged and read.

`checkpointer.Checkpointer` is what a run uses. Nothing is imported here, so that `folder` and
`record` can be read by programs that do without torch.
"""
