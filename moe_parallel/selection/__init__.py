"""Selection rules, which are pure functions from scores to choices, and expert capacity.

A rule draws no random numbers: the layer gives it those that it needs. One rule reads what changes
between steps: `MovingTopP`, whose p a controller moves.
"""
