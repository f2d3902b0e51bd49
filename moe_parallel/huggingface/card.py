"""The model card: README.md of an exported model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from moe_parallel.config import Config
from moe_parallel.huggingface.own_model import ARCHITECTURE
from moe_parallel.huggingface.tensors import folded_width
from moe_parallel.systems import LoryPrefixSelection, LorySelection
from moe_parallel.systems.expert_choice import ExpertsChoose
from moe_parallel.telemetry.metrics import MetricsLine


@dataclass(frozen=True)
class Facts:
    """What the card says that the configuration does not."""

    name: str
    architecture: str
    parameters: int
    dtype: str
    training: dict[str, int]  # iteration, consumed_tokens, consumed_samples
    validation: MetricsLine | None  # of that iteration, by domain
    folded: bool
    has_tokenizer: bool
    adds_special_tokens: bool  # the tokenizer, to each text, unless it is told not to


EARLIER_TOKENS = "A token's output depends on this token and earlier ones."
EXPERTS_CHOSE = (
    "In training each expert chose among all tokens of a micro-batch, later ones too, so the "
    "training loss is not the likelihood of the text. Here each token chooses its experts, as in "
    "the run's evaluations, and its output depends on this token and earlier ones."
)


def export_notes(config: Config) -> list[str]:
    """What differs between the exported model and the run, and what a token's output depends on.

    Sentences for the user; none is specific to a format.
    """
    selection: Any = config.selection
    if config.moe.num_experts is None:
        return [EARLIER_TOKENS]
    if isinstance(selection, LorySelection | LoryPrefixSelection):
        return _notes_of_lory(selection)
    found = [EXPERTS_CHOSE if isinstance(selection, ExpertsChoose) else EARLIER_TOKENS]
    if selection.reads_token_ids:
        found.append(
            "The ids of the tokens choose the experts, so the model needs input_ids and refuses "
            "inputs_embeds."
        )
    if config.moe.moe_expert_capacity_factor is not None:
        found.append(
            "The run had a capacity: an expert that was full dropped tokens, in evaluations too. "
            "Here none is dropped, so outputs and losses may differ from the run's."
        )
    if getattr(selection, "screening", 0):
        found.append(
            "The run compared norms in FP8 first. Here all norms are exact, so a few choices may "
            "differ from the run's."
        )
    return found


def _notes_of_lory(selection: Any) -> list[str]:
    by_prefix, length = isinstance(selection, LoryPrefixSelection), selection.lory_segment_length
    by = f"first {length} tokens of the prompt" if by_prefix else "prompt"
    found = [
        f"The mean of the {by} merges the experts, once in each layer, for the prompt and all that "
        "is generated. In the prompt a token's output therefore depends on later tokens too. A "
        "loss over a text that is given at once is not its likelihood; use the run's own "
        "evaluation."
    ]
    if by_prefix:
        found.append(
            f"If a prompt has fewer than {length} tokens, tools/generate.py merges anew for each "
            "token, as this model does without a cache (use_cache=False). With one the mean of the "
            "prompt stays, so such a text may differ."
        )
    elif selection.lory_inference != "prompt":
        found.append(
            "The run's evaluations merge the experts anew for each segment, as this model does "
            "without a cache (use_cache=False). With one they are merged once, as in the run's "
            "generation."
        )
    return found


def model_card(config: Config, facts: Facts) -> str:
    """The text of README.md."""
    lines = [
        "---",
        "library_name: transformers",
        "pipeline_tag: text-generation",
        "tags:",
        "- moe_parallel",
        *(["- moe"] if config.moe.num_experts is not None else []),
        "---",
        "",
        f"# {facts.name}",
        "",
        f"A language model trained with moe_parallel, as `{facts.architecture}`.",
        "",
        *_table(("", ""), _model_rows(config, facts)),
        "",
        "## Evaluation",
        "",
        *_evaluation(facts),
        "",
        "## What a token's output depends on",
        "",
        *export_notes(config),
        "",
        "## Use",
        "",
        *_use(facts),
    ]
    return "\n".join(lines) + "\n"


def _model_rows(config: Config, facts: Facts) -> list[tuple[str, str]]:
    model, selection = config.model, config.selection
    rows = [
        ("parameters", f"{facts.parameters:,}, {facts.dtype}"),
        ("layers, width", f"{model.num_layers}, {model.hidden_size}"),
        ("context", f"{config.training.seq_length:,} tokens"),
    ]
    if config.moe.num_experts is not None:
        chosen = selection.choices_per_token
        gate = f"; W_g multiplied out, of width {folded_width(config)}" if facts.folded else ""
        rows += [
            ("selection of experts", f"`{selection.system}`"),
            ("experts of a layer", f"{config.num_experts}, of width {config.expert_width}{gate}"),
            ("experts of a token", "varies" if chosen is None else str(chosen)),
        ]
    trained = facts.training
    return [
        *rows,
        (
            "trained for",
            f"{trained['iteration']:,} iterations, {trained['consumed_tokens']:,} tokens",
        ),
    ]


def _evaluation(facts: Facts) -> list[str]:
    if not facts.validation:
        return [f"The run has no evaluation of iteration {facts.training['iteration']:,}."]
    columns = {"loss": "nats per token", "bits_per_byte": "bits per byte"}
    if any("loss_after_first_part" in each for each in facts.validation.values()):
        columns["loss_after_first_part"] = "nats per token after the first part"
    rows = [
        (domain, *(_number(of_domain.get(field)) for field in columns))
        for domain, of_domain in facts.validation.items()
    ]
    head = f"Held-out text, at iteration {facts.training['iteration']:,} of the run:"
    return [head, "", *_table(("domain", *columns.values()), rows)]


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, int | float) else "-"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _use(facts: Facts) -> list[str]:
    own = facts.architecture == ARCHITECTURE
    trust = ", trust_remote_code=True" if own else ""
    lines = [
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("PATH"{trust})',
    ]
    if facts.has_tokenizer:
        special = ", add_special_tokens=False" if facts.adds_special_tokens else ""
        lines += [
            f'tokenizer = AutoTokenizer.from_pretrained("PATH"{trust})',
            f'prompt = tokenizer("Once", return_tensors="pt"{special})',
            "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=50)[0]))",
        ]
    lines += ["```", ""]
    if own:
        lines.append(
            "The code of the model is in the files `*_moe_parallel.py` next to the weights, which "
            "`trust_remote_code=True` runs. After `import moe_parallel.hf` the installed code is "
            "used and the flag is not needed."
        )
    if not facts.has_tokenizer:
        lines.append(
            "transformers does not open the run's tokenizer. If the file `tokenizer.model` is "
            "here, SentencePiece opens it; otherwise the texts of the run were numbers of tokens."
        )
    if facts.adds_special_tokens:
        lines.append(
            "The tokenizer adds special tokens that the texts of the training did not have, unless "
            "it is told not to, as above."
        )
    return lines
