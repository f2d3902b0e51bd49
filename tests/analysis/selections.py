"""Made-up selections, and the same as plain lists, for tests of their totals and tables."""

import numpy as np

from moe_parallel.analysis.selections import ChosenExperts, TextSelections


def random_selections(
    text: str,
    first_sample: int,
    *,
    sequences: int = 3,
    length: int = 5,
    layers: int = 2,
    experts: int = 4,
    k: int = 2,
    vocabulary: int = 7,
    favorite: int | None = None,
    empty: float = 0.2,
    seed: int = 0,
) -> TextSelections:
    """Whole sequences of random tokens. `favorite`: the best expert of most tokens."""
    generator = np.random.default_rng([seed, first_sample, len(text)])
    tokens = sequences * length
    chosen = []
    for layer in range(1, layers + 1):
        order_TE = generator.random((tokens, experts)).argsort(axis=1)
        if favorite is not None:
            prefers_T = generator.random(tokens) < 0.7
            rank_TE = np.where(order_TE == favorite, -1, np.arange(experts))
            sorted_TE = np.take_along_axis(order_TE, rank_TE.argsort(axis=1, kind="stable"), axis=1)
            order_TE = np.where(prefers_T[:, None], sorted_TE, order_TE)
        experts_TK = np.where(generator.random((tokens, k)) < empty, -1, order_TE[:, :k])
        chosen.append(
            ChosenExperts(
                layer=layer,
                entropy_T=generator.random(tokens).astype(np.float32),
                dropped_T=generator.integers(0, 2, tokens),
                experts_TK=experts_TK,
                probs_TK=generator.random((tokens, k)).astype(np.float32),
                num_experts=experts,
            )
        )
    return TextSelections(
        text,
        np.repeat(np.arange(first_sample, first_sample + sequences), length),
        np.tile(np.arange(length, dtype=np.int32), sequences),
        generator.integers(0, vocabulary, tokens),
        tuple(chosen),
    )
