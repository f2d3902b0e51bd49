"""A model of this project as a model of lm-evaluation-harness.

This is the only module that imports lm_eval at its top. Import it after `tasks.require_harness`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import (
    get_rolling_token_windows,
    make_disjoint_window,
    simple_parse_args_string,
)
from tqdm import tqdm

from moe_parallel.data.tokenizer import Tokenizer
from moe_parallel.errors import InputError
from moe_parallel.generation.continuation import Continuation, TextWriter
from moe_parallel.generation.decode import Reuse
from moe_parallel.generation.language_model import GenerationModel
from moe_parallel.generation.sampling import Sampling
from moe_parallel.generation.scoring import Score, Span, score
from moe_parallel.training.open_model import open_alone

#: The options of a generated task that are understood, besides `until` and its length.
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
#: The most tokens of an answer, if a task does not say it and --seq-length has room.
MAX_ANSWER_TOKENS = 256


@register_model("moe_parallel")
class HarnessModel(TemplateLM):
    """Answers the requests of tasks, on the ranks of any layout.

    Every rank of a job gets all requests and returns all answers; the work is divided here. For
    the harness there is one rank.
    """

    def __init__(
        self, model: GenerationModel, tokenizer: Tokenizer, batch_size: int = 1, seed: int = 0
    ) -> None:
        super().__init__()
        self.model = model
        self.own_tokenizer = tokenizer
        self.batch_size = batch_size
        self.max_length = model.config.training.seq_length
        self.seed = seed
        self._by_prompt = model.config.selection.by_prompt
        self._until_exit: ExitStack | None = None
        self._hides_bars = None if dist.get_rank() == 0 else True  # None: not on a terminal

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> HarnessModel:
        """By the name of this model in the harness: its `model_args` are {"load": RUN}.

        The complete model is on this process. Raises InputError.
        """
        given = {**arg_dict, **(additional_config or {})}
        if "load" not in given:
            raise InputError("model_args have no load: name a run, or one of its checkpoints")
        stack = ExitStack()
        model, tokenizer = stack.enter_context(open_alone(str(given["load"])))
        found = cls(model, tokenizer, int(given.get("batch_size") or 1))
        found._until_exit = stack  # the process groups exist as long as this model
        return found

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: dict[str, Any] | None = None
    ) -> HarnessModel:
        """As `create_from_arg_obj`, from "load=RUN"."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        return self.own_tokenizer.eod

    @property
    def tokenizer_name(self) -> str:
        return self.own_tokenizer.fingerprint

    @property
    def prefix_token_id(self) -> int:
        return self.own_tokenizer.before_text

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """The ids of a text, which begins as the tokenizer says unless `add_special_tokens` is
        False."""
        beginning = [] if add_special_tokens is False else self.own_tokenizer.beginning
        return [*beginning, *self.own_tokenizer.tokenize(string)]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """ln p of each answer after its context, and whether it is the most probable one."""
        pairs = [request.args for request in requests]
        return self._loglikelihood_tokens([(pair, *self._encode_pair(*pair)) for pair in pairs])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """The tokens before the answer, at least one, and those of the answer, at least one.

        As in the harness, spaces at the end of the context are the answer's. So is a token with
        text of both: it is not in the context alone.
        """
        before, whole = self.tok_encode(context.rstrip()), self.tok_encode(context + continuation)
        first = 0
        while first < len(before) and before[first : first + 1] == whole[first : first + 1]:
            first += 1
        if first == len(whole):
            raise InputError(f"the answer {continuation!r} has no tokens: leave its task out")
        if first == 0:
            return [self.prefix_token_id], whole
        return whole[:first], whole[first:]

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """ln p of each whole text, by windows that do not overlap. A text begins a document."""
        spans: list[Span] = []
        texts: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for context, continuation in map(make_disjoint_window, windows):
                spans.append(Span([*context, *continuation], len(context)))
                texts.append(number)
        found = [0.0] * len(requests)
        scores = self._score(spans, greedy=False)
        for number, each in zip(texts, scores, strict=True):
            found[number] -= each.nats
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **others: Any,
    ) -> list[tuple[float, bool]]:
        spans = [self._span(context, answer) for _, context, answer in requests]
        scores = self._score(spans, greedy=True)
        found = [(-each.nats, bool(each.is_greedy)) for each in scores]
        for (pair, _, _), value in zip(requests, found, strict=True):
            if pair is not None:
                self.cache_hook.add_partial("loglikelihood", pair, value)
        return found

    def _span(self, context: Sequence[int], answer: Sequence[int]) -> Span:
        """The end of the context that fits, and the answer."""
        if len(answer) > self.max_length:
            raise InputError(
                f"an answer has {len(answer)} tokens, and the model reads --seq-length "
                f"{self.max_length}: leave its task out"
            )
        tokens = [*context, *answer][-(self.max_length + 1) :]
        first = len(tokens) - len(answer)
        return Span(tokens, first, first if self._by_prompt else None)

    def _score(self, spans: list[Span], *, greedy: bool) -> list[Score]:
        if not spans:
            return []
        with tqdm(total=len(spans), desc="likelihood", disable=self._hides_bars) as bar:
            return score(
                self.model, spans, self.batch_size, greedy=greedy, advance=lambda n: bar.update(n)
            )

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text after each context, up to a stop string of its task."""
        found = [""] * len(requests)
        groups: dict[Sampling, list[int]] = {}
        limits: dict[int, Continuation] = {}
        for number, request in enumerate(requests):
            sampling, limits[number] = self._options(request.args[1])
            groups.setdefault(sampling, []).append(number)
        with tqdm(total=len(requests), desc="texts", disable=self._hides_bars) as bar:
            for sampling, numbers in groups.items():
                writer = TextWriter(
                    self.model, self.own_tokenizer, sampling, Reuse.of(self.model.config), self.seed
                )
                prompts = [self._prompt(requests[i].args[0], limits[i]) for i in numbers]
                texts = writer.write(
                    prompts,
                    [limits[i] for i in numbers],
                    self.batch_size,
                    done=lambda _: bar.update(1),
                )
                for number, text in zip(numbers, texts, strict=True):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _options(self, given: dict[str, Any]) -> tuple[Sampling, Continuation]:
        default = min(MAX_ANSWER_TOKENS, self.max_length // 2)
        options = dict(normalize_gen_kwargs(given, default))
        most, stops = options["max_gen_toks"], options["until"]
        if not 0 <= most < self.max_length:
            raise InputError(
                f"max_gen_toks is {most}, and the model reads --seq-length {self.max_length}: set "
                "fewer in the task's generation_kwargs, 0 at least"
            )
        for name in set(options) - _SAMPLING - {"do_sample", "until", "max_gen_toks"}:
            if options[name] not in (None, False, 1):
                raise InputError(
                    f"generation_kwargs has {name} {options[name]}, which this project lacks: "
                    "leave its task out"
                )
        known = {name: options[name] for name in _SAMPLING if options.get(name) is not None}
        if not options["do_sample"]:
            known["temperature"] = 0.0
        sampling = Sampling(**known)
        sampling.check()
        return sampling, Continuation(most, tuple(stop for stop in stops if stop))

    def _prompt(self, context: str, limit: Continuation) -> list[int]:
        """The end of the context that leaves room for the answer."""
        tokens = self.tok_encode(context) or [self.prefix_token_id]
        return tokens[-(self.max_length - limit.max_tokens) :]
