"""A third-party system: a configuration, a rule and a record in its own package."""

import os
import sys
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml

from moe_parallel.config import make_config
from moe_parallel.errors import InputError
from tests.distributed import run_distributed
from tests.huggingface.exporting import PROMPT, STEPS, export_run, save_runs
from tests.program import SCRIPT, SMALL, Program, flags, small_data
from tests.tools.running import run_tool
from tests.training.tiny_run import Layout, TinyRun

PACKAGE = '''
"""Window: in training a token has the expert of greatest score within a window of experts.

The window turns from token to token. In evaluation it has all experts.
"""

from dataclasses import dataclass

import torch

from moe_parallel.config import Balancing, RoutedSelection
from moe_parallel.config.option import option
from moe_parallel.errors import InputError
from moe_parallel.layers import RoutedLayer, Rules, System, register
from moe_parallel.selection.choices import Choices
from moe_parallel.selection.rules import raw_probability
from moe_parallel.selection.topk import TopK


@dataclass(frozen=True)
class WindowSelection(Balancing, RoutedSelection, system="window"):
    """The expert of greatest logit among those of a window."""

    window_size: int = option(2, "experts in a window", least=1, weights=True)
    window_in_evaluation: bool = option(False, "use the window in evaluation, too")

    @property
    def choices_per_token(self):
        return 1

    def check(self, config, world_size):
        super().check(config, world_size)
        if self.window_size > config.num_experts:
            raise InputError(
                f"--window-size is {self.window_size}, above --num-experts {config.num_experts}: "
                f"choose at most {config.num_experts}"
            )


@dataclass(frozen=True)
class Window:
    size: int

    def __call__(self, scores_TE, tokens):
        tokens_T = torch.arange(len(scores_TE), device=scores_TE.device)
        experts_E = torch.arange(scores_TE.shape[1], device=scores_TE.device)
        distance_TE = (experts_E - tokens_T[:, None]) % len(experts_E)
        logits_TE = scores_TE.masked_fill(distance_TE >= self.size, -torch.inf)
        experts_TK = logits_TE.argmax(dim=1, keepdim=True)
        probabilities_TE = torch.softmax(scores_TE, dim=1)
        return Choices(
            experts_TK, probabilities_TE.gather(1, experts_TK), scores_TE, probabilities_TE
        )


def rules(selection):
    window = Window(selection.window_size)
    whole = TopK(1, raw_probability)
    return Rules(window, window if selection.window_in_evaluation else whole)


register(System(WindowSelection, layer=RoutedLayer, rules=rules))

'''

OPTIONS = {"expert_selection": "window_system:window", "window_size": 1, "moe_aux_loss_coeff": 0.05}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / "window_system.py").write_text(PACKAGE)
    page = (SCRIPT.parent / "docs/systems/adding.md").read_text()
    (folder / "my_router.py").write_text(page.split("```python\n")[1].split("```")[0])
    return folder


def _train(package: Path, runs: Path, layout: Layout) -> tuple[list[tuple[float, float]], list]:
    """Two steps, a checkpoint and another step; then that step again from the checkpoint."""
    sys.path.insert(0, str(package))

    run = TinyRun(layout, runs, options=OPTIONS)
    measured = run.steps(2)
    run.save()
    last = run.steps(1)
    run.close()
    again = TinyRun(layout, runs, options=OPTIONS)
    again.load(runs)
    return measured + last, again.steps(1) + last


def test_it_trains_on_one_rank_and_on_two_and_goes_on(package: Path, tmp_path: Path) -> None:
    ((alone, resumed),) = run_distributed(1, _train, package, tmp_path / "one", Layout())
    two = run_distributed(2, _train, package, tmp_path / "two", Layout(2, ep=2))
    assert resumed[0] == resumed[1]
    for parallel, _ in two:
        for (loss, norm), (its_loss, its_norm) in zip(alone, parallel, strict=True):
            assert its_loss == pytest.approx(loss, abs=1e-6)
            assert its_norm == pytest.approx(norm, rel=1e-5)


def _drawn(package: Path, folder: Path, layout: Layout) -> list[tuple[float, float]]:
    sys.path.insert(0, str(package))
    options = {"expert_selection": "my_router:lucky", "lucky_share": 0.5}
    run = TinyRun(layout, folder, options=options)
    return run.steps(3)


def test_what_the_rule_of_the_page_draws_is_the_same_in_every_layout(
    package: Path, tmp_path: Path
) -> None:
    (alone,) = run_distributed(1, _drawn, package, tmp_path, Layout())
    for layout in (Layout(2), Layout(2, ep=2), Layout(2, tp=2, etp=2), Layout(2, cp=2)):
        for measured in run_distributed(layout.world, _drawn, package, tmp_path, layout):
            assert measured == [pytest.approx(each, rel=1e-5) for each in alone], layout


def _describe(package: Path) -> tuple[str, str, list[str]]:
    sys.path.insert(0, str(package))

    from moe_parallel import RoutedMoE
    from moe_parallel.config import make_config, validate
    from moe_parallel.config.command_line import read_command_line
    from moe_parallel.errors import InputError
    from moe_parallel.systems import SELECTIONS

    with redirect_stdout(StringIO()) as text, pytest.raises(SystemExit):
        read_command_line(["--expert-selection", "window_system:window", "--help", "all"])
    config = make_config(OPTIONS | {"num_experts": 4, "window_size": 5})
    with pytest.raises(InputError) as broken:
        validate(config, 1)
    moe = RoutedMoE(8, 4, selection=SELECTIONS["window"](window_size=1), backend="reference")
    return (
        " ".join(text.getvalue().split()),
        str(broken.value),
        [type(moe.layer).__name__, moe.layer.rule.size],
    )


def test_it_has_flags_rules_and_a_layer_like_any_other(package: Path) -> None:
    ((text, broken, layer),) = run_distributed(1, _describe, package)
    assert "--window-size N" in text and "[window] experts in a window (default: 2)" in text
    assert ", window: the system" in text
    assert broken == "--window-size is 5, above --num-experts 4: choose at most 4"
    assert layer == ["RoutedLayer", 1]


def _export(package: Path, folder: Path) -> tuple[float, bool, str]:
    """How far the exported logits are from the run's, and the reason for a refusal."""
    sys.path.insert(0, str(package))
    from transformers import AutoModelForCausalLM

    import moe_parallel.hf  # noqa: F401  registers the architecture
    from moe_parallel.errors import InputError

    ((logits, tokens),) = save_runs([(folder / "run", OPTIONS)])
    export_run(folder / "run", folder / "exported")
    model = AutoModelForCausalLM.from_pretrained(folder / "exported").eval()
    prompt = torch.tensor([PROMPT])
    with torch.no_grad():
        found = model(prompt).logits[0]
        written = model.generate(
            prompt, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False
        )
    save_runs([(folder / "refused", OPTIONS | {"window_in_evaluation": True})])
    with pytest.raises(InputError) as refused:
        export_run(folder / "refused", folder / "nothing")
    distance = float((found - logits).abs().max() / logits.abs().max())
    return distance, written[0, len(PROMPT) :].tolist() == tokens, str(refused.value)


@pytest.mark.full
def test_it_is_exported_if_transformers_can_compute_it(package: Path, tmp_path: Path) -> None:
    ((distance, same_text, refused),) = run_distributed(1, _export, package, tmp_path)
    assert distance <= 1e-5 and same_text
    assert refused == (
        "--load: --expert-selection window has no form in transformers, which export, "
        "texts and tasks need: its rule, Window, has no exported form"
    )


def _own_probs() -> str:
    from moe_parallel.huggingface.own_model import rule_fields
    from moe_parallel.layers import RoutedLayer, Rules, System, register
    from moe_parallel.selection.topk import TopK
    from moe_parallel.systems import TopKSelection

    class HalfSelection(TopKSelection, system="half"):
        pass

    def half(scores_TE, probabilities_TE, experts_TK):
        return probabilities_TE.gather(1, experts_TK) / 2

    rule = TopK(2, half)
    register(System(HalfSelection, RoutedLayer, lambda _: Rules(rule, rule)))
    with pytest.raises(InputError) as refused:
        rule_fields(HalfSelection(), 4)
    return str(refused.value)


def test_weights_of_its_own_are_not_exported() -> None:
    (refused,) = run_distributed(1, _own_probs)
    assert "half has no form in transformers" in refused
    assert "need: its rule weights experts by <func" in refused


def _layers_of_its_own(package: Path) -> tuple[str, list[str]]:
    """The refusal of a layer that exports do not know, and how another package makes it known."""
    sys.path.insert(0, str(package))
    import window_system

    from moe_parallel.config import make_config
    from moe_parallel.errors import InputError
    from moe_parallel.huggingface.own_model import (
        ExportedLayer,
        own_config_json,
        own_steps,
        register_layer,
    )
    from moe_parallel.huggingface.tensors import routed_steps
    from moe_parallel.layers import RoutedLayer
    from moe_parallel.layers.system import System, register

    class MirrorLayer(RoutedLayer):
        pass

    class MirrorSelection(window_system.WindowSelection, system="mirror"):
        pass

    register(System(MirrorSelection, layer=MirrorLayer, rules=window_system.rules))
    config = make_config({"expert_selection": "mirror", "num_experts": 4, "num_layers": 1})
    with pytest.raises(InputError) as refused:
        own_config_json(config, 20, fold=False)
    exported = ExportedLayer(lambda config: {"router_hidden_size": None}, routed_steps)
    register_layer(MirrorLayer, exported)
    fields = own_config_json(config, 20, fold=False)
    assert fields["rule"] == "topk" and fields["num_experts_per_tok"] == 1
    names = [name for step in own_steps(config, 20, fold=False) for name, _ in step.results]
    return str(refused.value), [name for name in names if ".mlp." in name]


def test_a_layer_of_its_own_is_refused_until_it_is_registered(package: Path) -> None:
    ((refused, names),) = run_distributed(1, _layers_of_its_own, package)
    assert refused.endswith("need: its layer, MirrorLayer, has no exported form")
    mlp = "model.layers.0.mlp"
    assert names == [
        f"{mlp}.gate.router_out",
        f"{mlp}.experts.gate_up_proj",
        f"{mlp}.experts.down_proj",
    ]


def _count(package: Path) -> tuple[float, float]:
    sys.path.insert(0, str(package))
    from moe_parallel.model.flops import token_flops

    sizes = {"num_experts": 4, "num_layers": 2, "hidden_size": 64, "moe_ffn_hidden_size": 96}
    flops = token_flops(make_config(OPTIONS | sizes), 128, 1)
    return flops.scores, flops.experts


def test_its_flops_are_counted(package: Path) -> None:
    ((scores, experts),) = run_distributed(1, _count, package)
    layers, n, d, f = 2, 4, 64, 96
    assert (scores, experts) == (layers * 2 * n * d, layers * 6 * d * f)


def _generate(package: Path, folder: Path) -> bool:
    """Whether a text, with a cache in a batch, is that of the run's model."""
    sys.path.insert(0, str(package))
    from moe_parallel.generation import TextWriter
    from moe_parallel.huggingface.export import model_in_memory, source_of

    ((_, tokens),) = save_runs([(folder / "run", OPTIONS)])
    source = source_of(str(folder / "run"))
    greedy = {"temperature": 0, "top_k": None, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    writer = TextWriter(model_in_memory(source), source.tokenizer, 32, greedy)
    texts = writer.write([PROMPT, PROMPT[:4]], STEPS, batch_size=2)
    return texts[0] == source.tokenizer.detokenize(tokens) != texts[1]


def test_it_generates_as_the_runs_model(package: Path, tmp_path: Path) -> None:
    assert run_distributed(1, _generate, package, tmp_path) == [True]


WRONG_NAMES = {
    "window_sistem:window": "finds no module window_sistem: install its package, or add its folder",
    "window_system:door": "window_system defines no system door",
    "json:window": "before the colon it takes the name of a module with a system",
    "../window_system:window": "before the colon it takes the name of a module with a system",
}


def _name_wrongly(package: Path) -> None:
    sys.path.insert(0, str(package))
    for name, message in WRONG_NAMES.items():
        with pytest.raises(InputError, match=f"--expert-selection is .*{message}"):
            make_config({"expert_selection": name})


def test_names_that_lead_to_no_system(package: Path) -> None:
    run_distributed(1, _name_wrongly, package)


@pytest.mark.full
def test_every_tool_takes_its_run(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = os.pathsep.join([str(SCRIPT.parent), str(package)])
    monkeypatch.setenv("PYTHONPATH", path)
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("zero one two three")
    options = SMALL | small_data(tmp_path) | OPTIONS | {"save": run, "window_in_evaluation": True}
    line = flags(options | {"expert_model_parallel_size": 2})
    with Program(tmp_path, 2, line, {"PYTHONPATH": path}) as program:
        assert program.finish() == 0, program.output
    recorded = yaml.safe_load((run / "config.yaml").read_text())["expert-selection"]
    assert recorded == OPTIONS["expert_selection"]
    for tool in (
        ("evaluate.py", "--load", run, "--input", text),
        ("analyze.py", "--load", run, "--samples", 2, "--permutations", 10),
        ("checkpoint.py", "verify", run),
        ("count_parameters.py", "--config", run / "config.yaml"),
    ):
        done = run_tool(*tool)
        assert done.returncode == 0, done.stderr
    for tool in (
        ("export_hf.py", "--load", run, "--output", tmp_path / "exported"),
        ("generate.py", "--load", run, "--prompt", "zero one two", "--tokens", 3),
    ):
        refused = run_tool(*tool)
        assert refused.returncode == 2
        assert refused.stderr.endswith("its rule, Window, has no exported form\n")


def _balance() -> tuple[str, list[tuple[str, bool]]]:
    """A refusal of a record without cutoffs; what layers of derived systems hold."""
    from moe_parallel import RoutedMoE
    from moe_parallel.layers import RoutedLayer, System, register, system_of
    from moe_parallel.systems import ThresholdSelection, TopKSelection
    from moe_parallel.systems.threshold import rule as threshold
    from moe_parallel.systems.topk import rule as topk

    class OtherTopK(TopKSelection, system="other_topk"):
        pass

    class OtherThreshold(ThresholdSelection, system="other_threshold"):
        pass

    system_of(ThresholdSelection())
    with pytest.raises(ValueError) as refused:
        register(System(OtherThreshold, RoutedLayer, threshold.rules))
    register(System(OtherTopK, RoutedLayer, topk.rules))
    register(replace(threshold.THRESHOLD, selection=OtherThreshold))
    by_errors = {"moe_router_enable_expert_bias": True, "moe_router_bias_update": "error"}
    found = []
    for selection in (OtherTopK(**by_errors), OtherThreshold()):
        moe = RoutedMoE(8, 4, selection=selection, backend="reference")
        held = moe.layer.bias
        before_E = held.bias_E.clone()
        # 14 choices of 4 experts are never even, whatever the initial weights are.
        moe(torch.randn(7, 8, generator=torch.Generator().manual_seed(1)))
        moe.after_step()
        found.append((type(held).__name__, not torch.equal(before_E, held.bias_E)))
    return str(refused.value), found


def test_options_bring_a_bias_and_a_record_names_what_makes_cutoffs() -> None:
    ((refused, found),) = run_distributed(1, _balance)
    assert found == [("ProportionalBias", True), ("QuantileCutoffs", True)]
    assert refused == (
        "OtherThreshold has the options of cutoffs, but its record makes none: add "
        "bias=expert_cutoffs of moe_parallel.systems.threshold.rule"
    )


def _register_twice() -> list[str]:
    from moe_parallel.config import RoutedSelection
    from moe_parallel.layers import RoutedLayer, System, register, system_of
    from moe_parallel.systems import TopKSelection
    from moe_parallel.systems.topk import rule as topk

    messages = []
    for action in (
        lambda: register(System(TopKSelection, RoutedLayer, topk.rules)),
        lambda: register(System(RoutedSelection, RoutedLayer, topk.rules)),
        lambda: type("Other", (RoutedSelection,), {}, system="topk"),
        lambda: system_of(RoutedSelection()),
    ):
        with pytest.raises(ValueError) as caught:
            action()
        messages.append(str(caught.value))
    return messages


def test_a_word_and_a_configuration_stand_for_one_system() -> None:
    ((twice, nameless, taken, unknown),) = run_distributed(1, _register_twice)
    assert twice == "TopKSelection has a record already"
    assert nameless.startswith("RoutedSelection has no word of its own for --expert-selection")
    assert taken == "the name 'topk' already belongs to TopKSelection"
    assert unknown.startswith("RoutedSelection has no record: register a System for it")


BIASED = """
from dataclasses import dataclass

from moe_parallel.config import BiasBalancing
from moe_parallel.layers import RoutedLayer, System, register
from window_system import WindowSelection, rules


@dataclass(frozen=True)
class BiasedSelection(BiasBalancing, WindowSelection, system="biased"):
    pass


register(System(BiasedSelection, layer=RoutedLayer, rules=rules))
"""


def _refusal_of_a_bias(package: Path) -> str:
    sys.path.insert(0, str(package))
    from moe_parallel import RoutedMoE
    from moe_parallel.config import selection_of

    kind = selection_of("biased_system:biased")
    with pytest.raises(InputError) as refused:
        RoutedMoE(
            8,
            4,
            selection=kind(window_in_evaluation=True, moe_router_enable_expert_bias=True),
            backend="reference",
        )
    return str(refused.value)


def test_a_rule_that_takes_no_bias_refuses_one(package: Path) -> None:
    (package / "biased_system.py").write_text(BIASED)
    (refused,) = run_distributed(1, _refusal_of_a_bias, package)
    assert refused == (
        "Window has no method with_bias, so no bias can shift the scores of its experts: leave out "
        "--moe-router-enable-expert-bias, or use another system"
    )
