"""Made-up records of runs, of any shape, for the tests of the figures."""

import math

import numpy as np


def synthetic_run(
    logged: int = 60,
    layers: int = 12,
    experts: int = 8,
    every: int = 10,
    domains: tuple[str, ...] = ("code", "prose"),
    norms: bool = True,
    dropped: int = 0,
    tokens: int = 4096,
) -> list[dict]:
    """Losses decrease, loads become even, confidence grows with depth; evaluated every 5th."""
    generator = np.random.default_rng(1)
    leaning = generator.normal(0, 1, (layers, experts))
    records = []
    for index in range(1, logged + 1):
        iteration, done = index * every, index / logged
        record = {
            "iteration": iteration,
            "lm_loss": 3.0 + 5.3 * math.exp(-6 * done) + generator.normal(0, 0.04),
            "grad_norm": 1.0,
            "learning_rate": 1e-3,
            "tokens_per_second": 9000.0,
            "consumed_tokens": iteration * tokens,
            "layers": [],
        }
        for layer in range(layers):
            scores = leaning[layer] * (0.2 + math.exp(-5 * done)) + generator.normal(
                0, 0.05, experts
            )
            load = np.exp(scores) / np.exp(scores).sum()
            record["layers"].append(
                {
                    "layer": layer + 1,
                    "tokens_per_expert": (load * tokens * every * 2).round().astype(int).tolist(),
                    "tokens_dropped": dropped,
                    "ent_load": float(-(load * np.log(load)).sum()),
                    "ent_conf": math.log(experts) * (1 - 0.1 * done * (1 + 2 * layer / layers)),
                    "max_minus_min_load": float(load.max() - load.min()),
                }
            )
            if norms:
                record["layers"][-1]["norm_per_expert"] = (5 + scores).tolist()
        if domains and (index % 5 == 0 or index == logged):
            record["validation"] = {
                domain: {
                    "loss": record["lm_loss"] + 0.2 * place + 0.1,
                    "bits_per_byte": (record["lm_loss"] + 0.2 * place + 0.1) / math.log(2) / 3.5,
                }
                for place, domain in enumerate(domains)
            }
        records.append(record)
    return records
