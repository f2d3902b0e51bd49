"""Checkpoints: their content, and how they are written, published, found, checked and read.

A run uses `checkpointer.Checkpointer`. Nothing is imported here, so that programs without torch
can import `folder` and `record`.
"""
