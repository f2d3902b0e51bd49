"""A microscope for routers: tokens whose right expert is known (docs/results/microscope).

    python tools/study/microscope.py run                # the cells of the plan that are missing
    python tools/study/microscope.py cell main/topk/11  # one cell, and the committed one
    python tools/study/microscope.py page               # tables and figures, from the cells

A cell is a condition, a contender and a seed. The contender is a control, the name of a system, or
MODULE:WORD for one of your own.

Shape suffixes: N blocks, P places of a block, B sequences, S their tokens, A answers per token,
F functions, C cues, V arguments, D model width, H heads, E experts, K slots.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import matplotlib
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from moe_parallel.analysis.run_figure import DOMAIN_COLORS, STYLE
from moe_parallel.analysis.study.measures import LEVEL, PairedTest, half_width, holm
from moe_parallel.analysis.study.report import markdown_table
from moe_parallel.balancing.controller import end_step
from moe_parallel.config import make_config, selection_of, validate_layer
from moe_parallel.errors import InputError
from moe_parallel.layers import LayerConfig
from moe_parallel.layers.dispatched import DispatchedLayer, build_context
from moe_parallel.layers.expert_layer import ExpertLayer
from moe_parallel.layers.merged import MergedLayer
from moe_parallel.layers.system import system_of
from moe_parallel.library.layers import LayerTotals
from moe_parallel.parallel import groups_of_one
from moe_parallel.tool import Tool

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results" / "microscope"
CELLS, PAGE = "cells.jsonl", "README.md"

PLACES, BLOCKS = 8, 4  # of a block, a cue and seven arguments; of a sequence
ARGUMENTS, ANSWERS = 24, 2
WIDTH, HEADS, EXPERTS, NEURONS = 24, 3, 8, 4
STD, STEPS, BATCH, HELD_OUT, EVERY, WARM_UP = 0.1, 500, 32, 64, 20, 20
FIRST_ANSWER = 1 + ANSWERS  # the place of the first argument with enough others before it
IGNORED = -100

FORCED = {"oracle": 1, "pairs": 2}  # the functions that share an expert
DENSE = {"dense": NEURONS, "dense_all": NEURONS * EXPERTS}
SYSTEMS = (
    "topk", "top_p", "relu", "threshold", "expert_choice", "corm", "aoe", "aoe_top_p",
    "aoe_threshold", "aoe_expert_choice", "routing_free", "uoe", "lory", "lory_prefix", "smear",
    "segment_expert_choice",
)  # fmt: skip
CONTROLS = (*FORCED, "hash", *DENSE)
#: What makes a system compute one expert a token, and what the sizes here ask for. All else is its
#: default.
OPTIONS = {
    "moe_router_topk": 1,
    "moe_top_p_target_experts": 1.0,
    "moe_relu_target_experts": 1.0,
    "moe_threshold_target_experts": 1.0,
    "moe_expert_choice_capacity_factor": 1.0,
    "routing_free_target_experts": 1.0,
    "aoe_low_rank_size": NEURONS,
    "aoe_up_init_method": "scaled",
    "lory_segment_length": PLACES // 2,
    "smear_sees_the_future": True,
}


@dataclass(frozen=True)
class Condition:
    functions: int = 8
    noise: float = 0.0  # the share of the cues that name a function drawn evenly
    skew: float = 0.0  # function i has a frequency proportional to i^-skew
    aux: float | None = None  # the coefficient of the load-balancing loss; None: the default
    steps: int = STEPS


CONDITIONS = {
    "main": Condition(),
    "noise-0.4": Condition(noise=0.4),
    "skew-1": Condition(skew=1.0),
    "functions-16": Condition(functions=16),
    "aux-0": Condition(aux=0.0),
    "aux-1": Condition(aux=1.0),
    "steps-2000": Condition(steps=2000),
}
RATES, PILOT_SEEDS = (0.01, 0.02, 0.04, 0.08, 0.16), (0, 101, 102)
SEEDS, SWEEP_SEEDS = range(11, 31), range(11, 21)
SWEPT = ("oracle", "topk", "top_p", "aoe", "expert_choice", "routing_free")
BALANCED = ("topk", "top_p", "aoe")  # those swept that have a load-balancing loss
CURVES = ("topk", "aoe", "expert_choice", "uoe", "relu", "lory", "oracle", "dense", "hash")
HEAD = ["", "excess", "minus `topk`", "p", "", "half", "seeds", "information", "experts", "rate"]
MEASURES = {"excess": "excess, nats an answer", "information": "information of function and expert"}
MARGIN, MOST_EXPERTS = 0.05, 2.0  # nats an answer; experts an answer of those that are compared


class Batch(NamedTuple):
    ids_BS: Tensor
    cues_BS: Tensor  # the function that the cue of a token's block names
    labels_ABS: Tensor  # IGNORED: no answer here
    answers_ABSV: Tensor  # the distribution of the label, given what the model can know


class Task:
    """Blocks of a cue and seven arguments. Each argument but the first two is answered by the
    images of the two arguments before it, under the maps of the function that the cue names.
    """

    def __init__(self, condition: Condition, seed: int) -> None:
        functions, self.noise = condition.functions, condition.noise
        self.generator = torch.Generator().manual_seed(seed)
        maps = [torch.randperm(ARGUMENTS, generator=self.generator) for _ in range(2 * functions)]
        self.maps_AFV = torch.stack(maps).view(ANSWERS, functions, ARGUMENTS)
        frequency_F = torch.arange(1, functions + 1, dtype=torch.float64) ** -condition.skew
        self.frequency_F = frequency_F / frequency_F.sum()
        told_FC = (1 - self.noise) * torch.eye(functions, dtype=torch.float64)
        joint_FC = self.frequency_F[:, None] * (told_FC + self.noise / functions)
        self.frequency_C = joint_FC.sum(0)
        images_AFVV = F.one_hot(self.maps_AFV, ARGUMENTS).double()
        self.answers_ACVV = torch.einsum("fc,afvy->acvy", joint_FC / self.frequency_C, images_AFVV)

    def bayes_loss(self) -> float:
        """The least possible loss, nats per answer: the entropy of the answer, given cue and
        argument."""
        p_ACVV = self.answers_ACVV
        entropy_C = -torch.special.xlogy(p_ACVV, p_ACVV).sum(3).mean((0, 2))
        return float(self.frequency_C @ entropy_C)

    def batch(self, sequences: int) -> Batch:
        functions, blocks, g = len(self.frequency_F), sequences * BLOCKS, self.generator
        true_N = torch.multinomial(self.frequency_F, blocks, replacement=True, generator=g)
        other_N = torch.randint(functions, (blocks,), generator=g)
        lies_N = torch.rand(blocks, generator=g) < self.noise
        cue_N1 = torch.where(lies_N, other_N, true_N)[:, None]
        arguments_NP = torch.randint(ARGUMENTS, (blocks, PLACES - 1), generator=g)
        labels_ANP = torch.full((ANSWERS, blocks, PLACES), IGNORED)
        answers_ANPV = torch.zeros(ANSWERS, blocks, PLACES, ARGUMENTS)
        for a in range(ANSWERS):
            of_NP = arguments_NP[:, ANSWERS - 1 - a : PLACES - 2 - a]
            labels_ANP[a, :, FIRST_ANSWER:] = self.maps_AFV[a][true_N[:, None], of_NP]
            answers_ANPV[a, :, FIRST_ANSWER:] = self.answers_ACVV[a][cue_N1, of_NP].float()
        ids_NP = torch.cat([ARGUMENTS + cue_N1, arguments_NP], 1)
        length = BLOCKS * PLACES
        return Batch(
            ids_NP.view(sequences, length),
            cue_N1.expand(-1, PLACES).reshape(sequences, length),
            labels_ANP.view(ANSWERS, sequences, length),
            answers_ANPV.view(ANSWERS, sequences, length, ARGUMENTS),
        )


class SwiGLU(nn.Module):
    def __init__(self, neurons: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(WIDTH, 2 * neurons, bias=False)
        self.w_out = nn.Linear(neurons, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.w_in(x).chunk(2, -1)
        y: Tensor = self.w_out(F.silu(gate) * up)
        return y


class Model(nn.Module):
    """One layer: attention within a block, whose weights depend on the places alone, and experts.

    At the start head 0 looks at the cue, and head i at the i-th argument before the token.
    """

    def __init__(self, condition: Condition, contender: str) -> None:
        super().__init__()
        self.contender = contender
        self.tokens = nn.Embedding(ARGUMENTS + condition.functions, WIDTH)
        self.norm_1, self.norm_2, self.norm_3 = (nn.RMSNorm(WIDTH) for _ in range(3))
        self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.head = nn.Linear(WIDTH, ANSWERS * ARGUMENTS, bias=False)
        self.looks_HPP = nn.Parameter(torch.zeros(HEADS, PLACES, PLACES))
        self.register_buffer("later_PP", torch.ones(PLACES, PLACES).triu(1) > 0)
        self.aux_loss, self.steps = torch.zeros(()), 0
        self.chosen: Any = None  # Choices or Merges of the latest forward pass
        self.experts: ExpertLayer | SwiGLU
        if contender in DENSE:
            self.experts = SwiGLU(DENSE[contender])
        else:
            self.experts = self._layer(condition, contender)
        for weight in (each for each in self.parameters() if each is not self.looks_HPP):
            std = getattr(weight, "init_std", STD if weight.dim() > 1 else None)
            if std is not None or weight.dim() > 1:
                nn.init.normal_(weight, std=STD if std is None else std)
        with torch.no_grad():
            self.looks_HPP[0, :, 0] = 4
            for back in range(1, HEADS):
                self.looks_HPP[back].diagonal(-back).fill_(4)

    def _layer(self, condition: Condition, contender: str) -> ExpertLayer:
        name = "hash" if contender in FORCED else contender
        kind = selection_of(name)
        options = {option: value for option, value in OPTIONS.items() if hasattr(kind, option)}
        if condition.aux is not None:
            options["moe_aux_loss_coeff"] = condition.aux
        sizes = {"num_layers": 1, "num_attention_heads": 1, "hidden_size": WIDTH}
        sizes |= {"num_experts": EXPERTS, "moe_ffn_hidden_size": NEURONS}
        sizes |= {"train_iters": condition.steps}
        sizes |= {"ffn_hidden_size": NEURONS, "seq_length": BLOCKS * PLACES}
        config = make_config({**sizes, "init_method_std": STD, "expert_selection": name, **options})
        validate_layer(config)
        # The layer of `hash` reads ids; those that the forced controls show it are the cues.
        table_V = torch.arange(self.tokens.num_embeddings) // FORCED.get(contender, 1) % EXPERTS
        context = build_context(
            config,
            groups_of_one(),
            LayerTotals(),
            add_loss=self._keep_loss,
            iteration=lambda: self.steps,
            hash_table_VK=table_V[:, None],
        )
        selection = config.selection.rescaled(config)
        sized = LayerConfig(WIDTH, EXPERTS, STD)
        layer = system_of(selection).build(sized, selection, config.expert_width, context)
        layer.set_layer_number(1)
        chooser = "merges" if isinstance(layer, MergedLayer) else "choose"
        choose = getattr(layer, chooser)

        def watched(*arguments: Any) -> Any:
            self.chosen = choose(*arguments)
            return self.chosen

        setattr(layer, chooser, watched)
        return layer

    def _keep_loss(self, x_TD: Tensor, loss: Tensor) -> Tensor:
        self.aux_loss = loss
        return x_TD

    def forward(self, batch: Batch) -> Tensor:
        """The logits: [A, B, S, V]."""
        x_BSD = self.tokens(batch.ids_BS)
        v_BNPHX = self.value(self.norm_1(x_BSD)).unflatten(1, (BLOCKS, PLACES))
        v_BNPHX = v_BNPHX.unflatten(-1, (HEADS, -1))
        looks_HPP = self.looks_HPP.masked_fill(self.later_PP, -torch.inf).softmax(-1)
        y_BNPHX = torch.einsum("hpq,bnqhx->bnphx", looks_HPP, v_BNPHX)
        x_BSD = x_BSD + self.out(y_BNPHX.flatten(1, 2).flatten(2))
        hidden_BSD = self.norm_2(x_BSD)
        if isinstance(self.experts, SwiGLU):
            x_BSD = x_BSD + self.experts(hidden_BSD)
        else:
            self.aux_loss = torch.zeros(())
            forced = self.contender in FORCED
            self.experts.token_ids_BS = batch.cues_BS if forced else batch.ids_BS
            y_SBD, _ = self.experts(hidden_BSD.transpose(0, 1))
            x_BSD = x_BSD + y_SBD.transpose(0, 1)
        logits_BSAV = self.head(self.norm_3(x_BSD)).unflatten(-1, (ANSWERS, ARGUMENTS))
        return torch.permute(logits_BSAV, (2, 0, 1, 3))

    def after_step(self) -> None:
        self.steps += 1
        if isinstance(self.experts, DispatchedLayer):
            self.experts.after_step()
            if self.experts.controller is not None:
                end_step([self.experts.controller], torch.device("cpu"), groups_of_one().tp_dp_cp)

    def shares(self, batch: Batch) -> Tensor | None:
        """How often each expert computes an answer after each cue, in the latest pass: [C, E]."""
        if self.chosen is None:
            return None
        if isinstance(self.experts, MergedLayer):
            sizes = torch.tensor(self.chosen.sizes)
            shares_SBE = self.chosen.weights_MBE.repeat_interleave(sizes, 0)
        else:
            shares_SBE = self.chosen.chosen().unflatten(0, (-1, len(batch.ids_BS)))
        answered_BS = batch.labels_ABS[0] != IGNORED
        shares_CE = torch.zeros(self.tokens.num_embeddings - ARGUMENTS, EXPERTS)
        shares_BSE = shares_SBE.detach().float().transpose(0, 1)
        return shares_CE.index_add(0, batch.cues_BS[answered_BS], shares_BSE[answered_BS])


def normalized_information(shares_CE: Tensor) -> float:
    """2 I(C; E) / (H(C) + H(E)): 1 if cue and expert determine each other, 0 if independent."""

    def entropy(p: Tensor) -> Tensor:
        return -torch.special.xlogy(p, p).sum()

    p_CE = shares_CE.double() / shares_CE.double().sum()
    separate = entropy(p_CE.sum(0)) + entropy(p_CE.sum(1))
    return float(2 * (separate - entropy(p_CE)) / separate) if separate else 0.0


def train(condition: Condition, contender: str, seed: int, rate: float) -> dict[str, Any]:
    """Trains a cell and measures it. The same arguments give the same numbers on a processor."""
    torch.set_num_threads(1)
    task = Task(condition, seed)
    held_out = task.batch(HELD_OUT)
    torch.manual_seed(seed)
    model = Model(condition, contender)
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / WARM_UP) * (1 - step / condition.steps)
    )
    answers, losses = (held_out.labels_ABS != IGNORED).sum(), []
    for step in range(condition.steps + 1):
        if step % EVERY == 0:
            model.eval()
            with torch.no_grad():
                log_p_ABSV = model(held_out).log_softmax(-1)
            model.train()
            losses.append(float(-(held_out.answers_ABSV * log_p_ABSV).sum() / answers))
        if step == condition.steps:
            break
        batch = task.batch(BATCH)
        loss = F.cross_entropy(model(batch).flatten(0, 2), batch.labels_ABS.flatten())
        (loss + model.aux_loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        model.after_step()
    shares_CE = model.shares(held_out)
    found: dict[str, Any] = {"excess": losses[-1] - task.bayes_loss(), "bayes": task.bayes_loss()}
    if shares_CE is not None:
        found["information"] = normalized_information(shares_CE)
        found["experts"] = float(ANSWERS * shares_CE.sum() / answers)
    found = {name: round(value, 6) for name, value in found.items()}
    return found | {"losses": [round(loss, 3) for loss in losses]}


def plan() -> Iterator[str]:
    """CONDITION/CONTENDER/SEED of each cell. A pilot's condition is its rate."""
    everyone = (*CONTROLS, *SYSTEMS)
    for rate in RATES:
        yield from (f"rate-{rate}/{each}/{seed}" for seed in PILOT_SEEDS for each in everyone)
    for seed in SEEDS:
        yield from (f"main/{each}/{seed}" for each in everyone)
    for seed in SWEEP_SEEDS:
        for name, condition in CONDITIONS.items():
            contenders = SWEPT if condition.aux is None else BALANCED
            if name != "main":
                yield from (f"{name}/{each}/{seed}" for each in contenders)


Cells = dict[str, dict[str, Any]]  # by CONDITION/CONTENDER/SEED


def read_cells(folder: Path = FOLDER) -> Cells:
    file = folder / CELLS
    lines = file.read_text().splitlines() if file.exists() else []
    return {record.pop("cell"): record for record in map(json.loads, lines)}


def best_rate(cells: Cells, contender: str) -> float:
    """The rate of the pilots with the lowest mean loss; without pilots the middle one."""
    pilots = {
        rate: values(cells, contender, "excess", f"rate-{rate}", PILOT_SEEDS) for rate in RATES
    }
    found = {rate: fmean(excess) for rate, excess in pilots.items() if excess}
    return min(found, key=lambda rate: found[rate]) if found else RATES[len(RATES) // 2]


def compute(name: str, cells: Cells) -> dict[str, Any]:
    """Trains the cell CONDITION/CONTENDER/SEED. Raises InputError."""
    parts = name.split("/")
    if len(parts) != 3 or not parts[2].isdecimal():
        raise InputError(f"{name} is no cell: give CONDITION/CONTENDER/SEED, as main/topk/11")
    condition, contender, seed = parts
    pilots = {f"rate-{rate}": rate for rate in RATES}
    if condition in pilots:
        rate, meant = pilots[condition], Condition()
    elif condition in CONDITIONS:
        rate, meant = best_rate(cells, contender), CONDITIONS[condition]
    else:
        raise InputError(f"{condition} is no condition: take one of {', '.join(CONDITIONS)}")
    return {"rate": rate, **train(meant, contender, int(seed), rate)}


def main(arguments: list[str]) -> int:
    tool = Tool(__file__, __doc__)
    commands = tool.add_commands()
    commands.add_parser("run", help="compute the cells of the plan that are missing")
    one = commands.add_parser("cell", help="compute one cell and compare it with the committed one")
    one.add_argument("name", metavar="CONDITION/CONTENDER/SEED", help="for example main/topk/11")
    commands.add_parser("page", help="write the page's tables and figures from the cells")
    return tool.run(arguments, lambda given: _WORK[given.command](given, read_cells()))


def _run(given: argparse.Namespace, cells: Cells) -> None:
    for name in plan():
        if name not in cells:
            cells[name] = compute(name, cells)
            with (FOLDER / CELLS).open("a") as file:
                file.write(json.dumps({"cell": name} | cells[name]) + "\n")
            print(f"{name}: excess {cells[name]['excess']:.4f}", flush=True)


def _again(given: argparse.Namespace, cells: Cells) -> int:
    found, before = compute(given.name, cells), cells.get(given.name)
    print(json.dumps(found))
    if before is not None:
        print(f"{CELLS}: {'the same' if found == before else json.dumps(before)}")
    return int(before not in (None, found))


def _write_page(given: argparse.Namespace, cells: Cells) -> None:
    if missing := [name for name in plan() if name not in cells and name.startswith("main/")]:
        raise InputError(f"{CELLS} lacks {missing[0]}: start the command run first")
    text = (FOLDER / PAGE).read_text()
    for name, table in tables(cells).items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        text = before + mark + table + rest[rest.index(f"<!-- end of {name} -->") :]
    (FOLDER / PAGE).write_text(text)
    with matplotlib.rc_context(STYLE):
        for name, figure in figures(cells).items():
            figure.savefig(FOLDER / f"{name}.png", dpi=100)


_WORK = {"run": _run, "cell": _again, "page": _write_page}


def values(
    cells: Cells,
    contender: str,
    measure: str,
    condition: str = "main",
    seeds: Iterable[int] = SEEDS,
) -> list[Any]:
    """A measure of a contender's cells, by seed; [] if it has none."""
    found = [cells.get(f"{condition}/{contender}/{seed}", {}).get(measure) for seed in seeds]
    return [] if None in found else found


def by_excess(cells: Cells) -> list[str]:
    return sorted((*CONTROLS, *SYSTEMS), key=lambda each: fmean(values(cells, each, "excess")))


def steps_to_half(losses: Sequence[float]) -> float:
    """The steps until the loss is half of ln 24, that of a guess; between two measurements by the
    straight line."""
    half = math.log(ARGUMENTS) / 2
    later = next((place for place, loss in enumerate(losses) if loss <= half), None)
    if not later:
        return math.inf
    before, after = losses[later - 1 : later + 1]
    return EVERY * (later - (half - after) / (before - after))


def tables(cells: Cells) -> dict[str, str]:
    """The page's tables in Markdown, by name."""

    def interval(found: list[float], digits: int) -> str:
        half = half_width(len(found), 0.95) * statistics.stdev(found)
        return f"{fmean(found):.{digits}f} ± {half:.{digits}f}"

    reference = values(cells, "topk", "excess")
    tests = {
        each: PairedTest.of(
            [x - y for x, y in zip(values(cells, each, "excess"), reference, strict=True)], MARGIN
        )
        for each in SYSTEMS
        if each != "topk"
    }
    corrected = holm({each: test.p for each, test in tests.items()})
    systems = []
    for each in by_excess(cells):
        halves = [steps_to_half(losses) for losses in values(cells, each, "losses")]
        reached, half = sum(map(math.isfinite, halves)), statistics.median(halves)
        gap, p, verdict = "", "", ""
        if each in tests:
            test = tests[each]
            p = f"{corrected[each]:.3f}" if corrected[each] >= 0.001 else "< 0.001"
            gap = f"{test.mean:+.2f} ({test.low:+.2f} to {test.high:+.2f})".replace("-", "−")
            verdict = "worse" if test.mean > 0 else "better"
            if max(-test.low, test.high) < MARGIN:
                verdict = "equal"
            elif corrected[each] >= LEVEL:
                verdict = "not decided"
            if fmean(values(cells, each, "experts")) > MOST_EXPERTS:
                verdict = "computes more"
        of_choices = [values(cells, each, measure) for measure in ("information", "experts")]
        systems.append(
            [f"`{each}`" if each in SYSTEMS else f"*{each}*"]
            + [interval(values(cells, each, "excess"), 3), gap, p, verdict]
            + [f"{half:.0f}" if half < math.inf else f"> {STEPS}", f"{reached}"]
            + [f"{fmean(found):.2f}" if found else "" for found in of_choices]
            + [str(values(cells, each, "rate")[0])]
        )
    conditions = []
    for name in CONDITIONS:
        row = [name]
        for each in SWEPT:
            excess = values(cells, each, "excess", name, SWEEP_SEEDS)
            information = values(cells, each, "information", name, SWEEP_SEEDS)
            row.append(f"{interval(excess, 2)}; {fmean(information):.2f}" if excess else "")
        conditions.append(row)
    swept = ""
    if any("".join(row[1:]) for row in conditions[1:]):
        swept = markdown_table(["", *(f"`{each}`" for each in SWEPT)], conditions)
    return {"systems": markdown_table(HEAD, systems), "conditions": swept}


def figures(cells: Cells) -> dict[str, Figure]:
    """The page's figures, by name."""
    drawn = {
        name: Figure(figsize=size, layout="constrained")
        for name, size in (("systems", (9, 6)), ("learning", (9, 4.5)))
    }
    order = by_excess(cells)[::-1]
    for axes, measure in zip(
        drawn["systems"].subplots(1, 2, sharey=True), ("excess", "information"), strict=True
    ):
        for place, each in enumerate(order):
            found = values(cells, each, measure)
            color = "#444444" if each in CONTROLS else DOMAIN_COLORS[0]
            axes.plot(found, [place] * len(found), "o", color=color, alpha=0.3)
            if found:
                axes.plot(fmean(found), place, "|", color=color, ms=14, mew=2)
        axes.set_yticks(range(len(order)), order)
        axes.set(title=MEASURES[measure], xlim=(-0.03, None))
    axes = drawn["learning"].subplots()
    axes.axhline(math.log(Condition().functions), color="#cccccc")
    axes.text(STEPS, math.log(Condition().functions), "ln 8: any of the functions", ha="right")
    for place, each in enumerate(CURVES):
        losses = map(fmean, zip(*values(cells, each, "losses"), strict=True))
        style = {"color": DOMAIN_COLORS[place % 6], "ls": "-"}
        if each in CONTROLS:
            style = {"color": "#444444", "ls": ("-.", ":", "--")[place % 3]}
        axes.plot(range(0, STEPS + 1, EVERY), list(losses), label=each, **style)
    axes.set(title="held-out loss, nats an answer, mean of the seeds", xlabel="step")
    axes.legend(ncols=2)
    return drawn


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
