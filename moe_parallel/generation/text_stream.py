"""The text of tokens that come one at a time, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from moe_parallel.data.tokenizer import Tokenizer

_UNFINISHED = "�"  # what decoders write for bytes that are not a complete character
_CONTEXT = 8  # tokens of the prompt that are decoded too, because the first piece may lose a space


class TextStream:
    """Yields each character once it is certain.

    The end of the text is held back while it may be the beginning of a stop string or of a
    character of several bytes.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: Sequence[str] = (), prompt: Sequence[int] = ()
    ) -> None:
        """
        Args:
            stops: the text ends before the first of these; none is empty.
            prompt: the tokens before the text; its last ones determine the first space.
        """
        self.tokenizer = tokenizer
        self.stops = tuple(stops)
        self.stopped = False  # whether a stop string was found, or the document has ended
        self.text = ""  # that was given out
        self._context = list(prompt[-_CONTEXT:])
        self._start = len(tokenizer.detokenize(self._context))
        self._tokens: list[int] = []

    def add(self, token: int) -> str:
        """The characters that the next token makes certain; "" after the end."""
        if self.stopped:
            return ""
        if token == self.tokenizer.eod:
            return self.end()
        self._tokens.append(token)
        whole = self._whole()
        found = [place for stop in self.stops if (place := whole.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._give(whole[: min(found)])
        complete = whole.rstrip(_UNFINISHED)
        # A character has at most four bytes: the last three of these may begin one.
        certain = whole[: max(len(complete), len(whole) - 3)]
        return self._give(certain[: len(certain) - self._held_back(certain)])

    def end(self) -> str:
        """What was held back, at the end of the text."""
        if self.stopped:
            return ""
        self.stopped = True
        return self._give(self._whole())

    def _whole(self) -> str:
        return self.tokenizer.detokenize([*self._context, *self._tokens])[self._start :]

    def _held_back(self, text: str) -> int:
        """The length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) - 1 for stop in self.stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0

    def _give(self, certain: str) -> str:
        new = certain[len(self.text) :]
        self.text += new
        return new
