"""Rows as from a run, without any timing."""

from tools.bench.results import Result, Row

MILLISECOND = 1e-3


def result(name: str, *milliseconds: float, **fields: object) -> Result:
    return Result(name, [value * MILLISECOND for value in milliseconds], **fields)


def row(*results: Result, ceiling: tuple[float, ...] = (), **fields: object) -> Row:
    """A row whose ceiling takes 1 ms in every turn by default."""
    ceiling = ceiling or (1.0,) * len(results[0].samples)
    about: dict[str, object] = {
        "op": "permute",
        "timed": "forward",
        "size": "T=8 d=4",
        "dtype": "float32",
        "unit": "GB/s",
        "amount": 2e6,
    }
    return Row(ceiling=result("copy", *ceiling), results=list(results), **about | fields)
