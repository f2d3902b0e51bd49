"""The output of the first rank during training: lines, and on a terminal a bar below them."""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from typing import Any, TextIO

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from moe_parallel.telemetry.metrics import MetricsLine

#: Also erases what is not of the bar, such as the ^C of a terminal.
ERASE_LINE = "\r\x1b[K"


class PlainConsole:
    """One line per logged iteration, as in files, pipes and batch systems."""

    def __init__(self, train_iters: int, first: int, stream: TextIO) -> None:
        """`first`: iterations already done when this process began."""
        self._train_iters, self._first, self._stream = train_iters, first, stream
        self._start = time.monotonic()

    def advance(self, iteration: int) -> None:
        """Shows nothing between logged iterations."""

    def say(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def log(self, record: MetricsLine) -> None:
        if "lm_loss" in record:
            place, left = _place(record, self._train_iters), self._time_left(record)
            self.say(" | ".join([place, *_measures(record), *left]))
        if "validation" in record:
            self.say(validation_line(record, self._train_iters))

    def close(self) -> None:
        """Nothing needs closing."""

    def _time_left(self, record: MetricsLine) -> list[str]:
        done = record["iteration"] - self._first
        if done <= 0:
            return []
        seconds = (time.monotonic() - self._start) / done
        return [f"{duration(seconds * (self._train_iters - record['iteration']))} left"]


class LiveConsole(PlainConsole):
    """The same lines, and below them a bar with the time left.

    While it is open, Python warnings and log messages of this process also go above the bar. The
    bar has a width of its own, because a terminal that becomes narrower breaks longer lines in two,
    of which a bar can redraw only the last.
    """

    BAR = "{n_fmt}/{total_fmt} |{bar:10}| {remaining} left"

    def __init__(self, train_iters: int, first: int, stream: TextIO) -> None:
        super().__init__(train_iters, first, stream)
        self._bar = tqdm(
            total=train_iters,
            initial=first,
            file=stream,
            leave=False,
            dynamic_ncols=True,
            bar_format=self.BAR,
            smoothing=0.1,
        )
        self._redirects = contextlib.ExitStack()
        self._redirects.enter_context(logging_redirect_tqdm())
        logging.captureWarnings(True)

    def advance(self, iteration: int) -> None:
        """Moves the bar; `log` is for iterations with measurements."""
        self._bar.update(iteration - self._bar.n)

    def say(self, text: str) -> None:
        self._bar.write(ERASE_LINE + text, file=self._bar.fp)

    def log(self, record: MetricsLine) -> None:
        super().log(record)
        self.advance(record["iteration"])
        self._bar.refresh()

    def close(self) -> None:
        logging.captureWarnings(False)
        self._redirects.close()
        self._bar.close()
        print(end=ERASE_LINE, file=self._stream, flush=True)


def open_console(train_iters: int, first: int = 0, stream: TextIO | None = None) -> PlainConsole:
    """A bar if `stream` (standard output when None) is a terminal, plain lines if it is not."""
    stream = sys.stdout if stream is None else stream
    kind = LiveConsole if stream.isatty() else PlainConsole
    return kind(train_iters, first, stream)


def validation_line(record: MetricsLine, train_iters: int) -> str:
    domains = [
        f"{domain} {_number(measures.get('loss'), '.4f')} nats/token, "
        f"{_number(measures.get('bits_per_byte'), '.4f')} bits/byte"
        for domain, measures in record["validation"].items()
    ]
    return " | ".join([_place(record, train_iters), "validation", *domains])


def duration(seconds: float) -> str:
    """1:02:03, or 2:03 below one hour."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def _place(record: MetricsLine, train_iters: int) -> str:
    return f"iteration {record['iteration']:>{len(str(train_iters))}}/{train_iters}"


def _measures(record: MetricsLine) -> list[str]:
    """Loss and speed first; values that the record lacks are left out."""
    formats = {
        "lm_loss": ("loss {}", ".4f"),
        "tokens_per_second": ("{} tokens/s", ",.0f"),
        "mfu": ("MFU {}", ".1%"),
        "gpu_watts": ("{} W", ",.0f"),
        "grad_norm": ("grad norm {}", ".3f"),
        "learning_rate": ("lr {}", ".2e"),
        "consumed_tokens": ("{} tokens", ",d"),
    }
    values = record | record.get("machine", {})
    return [
        text.format(_number(values[key], number_format))
        for key, (text, number_format) in formats.items()
        if key in values
    ]


def _number(value: Any, number_format: str) -> str:
    return "nan" if value is None else format(value, number_format)
