"""A metrics record as the training loop writes it, made by hand."""


def example_record(iteration: int = 20, **more) -> dict:
    record = {
        "iteration": iteration,
        "lm_loss": 4.25,
        "grad_norm": 1.5,
        "learning_rate": 3e-4,
        "tokens_per_second": 12345.6,
        "consumed_tokens": 81920,
        "consumed_samples": 640,
        "elapsed_seconds": 12.5,
        "layers": [
            {
                "layer": layer,
                "tokens_per_expert": [6, 2],
                "tokens_dropped": 1,
                "ent_load": 0.5,
                "ent_conf": 0.25,
                "max_minus_min_load": 0.5,
                "norm_per_expert": [1.0, 3.0],
            }
            for layer in (1, 2)
        ],
    }
    return {**record, **more}


VALIDATION = {
    "code": {"loss": 3.5, "bits_per_byte": 1.75},
    "prose": {"loss": 4.5, "bits_per_byte": 2.25},
}
