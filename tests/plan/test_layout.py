"""Where the ranks of a group are."""

import pytest

from moe_parallel.plan.layout import Group


@pytest.mark.parametrize(
    ("size", "stride", "ranks"),
    [
        (8, 1, 8),
        (16, 1, 8),
        (4, 2, 4),
        (16, 2, 4),
        (4, 8, 1),
        (2, 64, 1),
        (6, 1, 2),  # ranks 6 to 11: two on the first node, four on the second
        (12, 1, 4),  # ranks 0 to 11: eight, and four
        (3, 4, 1),  # ranks 0, 4 and 8
        (1, 1, 1),
    ],
)
def test_the_fewest_ranks_of_a_group_on_a_node_of_8(size: int, stride: int, ranks: int) -> None:
    assert Group("", size, stride).on_node(8) == ranks
