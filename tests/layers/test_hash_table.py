"""The table of hash routing is a part of the model."""

import torch

from moe_parallel.systems.hash.rule import HashTable


def test_a_model_that_is_loaded_has_the_table_that_was_saved() -> None:
    """The text of the run that goes on may have other counts, and so make another table."""
    saved = HashTable(torch.tensor([[2], [0], [1]]))
    loaded = HashTable(torch.tensor([[0], [1], [2]]))
    loaded.load_state_dict(saved.state_dict())
    assert loaded(torch.tensor([0, 1, 2, 0])).tolist() == [[2], [0], [1], [2]]
