"""A checkpoint of Megatron-Core's own model becomes a run that computes the same, and goes back."""

from pathlib import Path
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe import experts

from moe_parallel.megatron_checkpoint.export import export
from moe_parallel.megatron_checkpoint.importing import import_checkpoint, plan_import
from tests.distributed import run_distributed
from tests.huggingface.imported import WITHOUT_TEXT, logits_here
from tests.megatron_checkpoint.models import (
    ARGUMENTS,
    TOKENS,
    Layout,
    differences,
    save,
    weights_of,
)

TE = Layout(is_te=True)
#: How the same weights may be stored.
FORMS = {
    "te": TE,
    "by layers": Layout(metadata="non_homogeneous_layers"),
    "by layers, experts and halves": Layout(metadata="singleton_local_shards"),
}
GROUPED = Layout(is_grouped=True)
IN_FORMS = ("mixtral", "deepseek")  # layers that are alike, and dense ones before those of experts


def _save_each(folder):
    """The logits of each model, saved plainly, and in `FORMS`."""
    logits = {name: save(name, folder / name) for name in ARGUMENTS}
    for name in IN_FORMS:
        for form, layout in FORMS.items():
            save(name, folder / f"{name} {form}", layout)
    if hasattr(experts, "GroupedMLP"):
        with mock.patch.object(experts.gg, "assert_grouped_gemm_is_available"):
            save("mixtral", folder / "mixtral grouped", GROUPED, folder / "mixtral/iter_0000003")
    return logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of checkpoints, and the logits of each model."""
    folder = tmp_path_factory.mktemp("megatron")
    return folder, run_distributed(1, _save_each, folder)[0]


def _run_of(theirs: Path) -> Path:
    run = theirs.with_name(f"{theirs.name}-run")
    if not run.exists():
        imported = import_checkpoint(plan_import(theirs, WITHOUT_TEXT), run)
        assert imported.checkpoint == run / "iter_0000000" and not imported.not_finite
    return run


def _weights(run: Path) -> dict[str, torch.Tensor]:
    return weights_of(run / "iter_0000000")


def _logits_and_differences(runs, exports):
    logits = {name: logits_here(run, TOKENS) for name, run in runs.items()}
    return logits, {key: differences(key[0], folder, key[1]) for key, folder in exports}


def test_logits_are_equal_and_bits_come_back(saved, tmp_path):
    folder, wanted = saved
    runs = {name: _run_of(folder / name) for name in ARGUMENTS}
    exports = []
    for name, run in runs.items():
        for implementation, layout in (("local", Layout()), ("transformer_engine", TE)):
            if layout.is_te and name not in IN_FORMS:
                continue
            target = tmp_path / f"{name} {implementation}"
            done = export(str(run), target, implementation)
            assert done.checkpoint == target / "release" and done.dtype == "float32"
            exports.append(((name, layout), done.checkpoint))
    ((logits, found),) = run_distributed(1, _logits_and_differences, runs, exports)
    for name, theirs in wanted.items():
        assert theirs.abs().max() > 1, f"{name}: logits near 0 would hide an error"
        torch.testing.assert_close(logits[name], theirs, atol=1e-5, rtol=0, msg=name)
    assert found and not any(found.values()), found


@pytest.mark.parametrize("name", IN_FORMS)
def test_every_form_has_the_same_tensors(name, saved):
    folder, _ = saved
    wanted = _weights(_run_of(folder / name))
    forms = [path for path in folder.iterdir() if path.name.startswith(f"{name} ")]
    forms = [path for path in forms if not path.name.endswith("-run")]
    assert len(forms) >= len(FORMS)
    for form in forms:
        found = _weights(_run_of(form))
        assert found.keys() == wanted.keys()
        assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == [], form.name


#: By the number of ranks: how the models are divided.
LAYOUTS = {
    2: [Layout(tp=2), Layout(pp=2, is_te=True), Layout(ep=2)],
    4: [Layout(tp=2, pp=2), Layout(pp=2, ep=2), Layout(tp=2, ep=4), Layout(tp=2, pp=2, is_te=True)],
}


def _save_and_load_each(folder, exports, layouts, names):
    found = {}
    for name in names:
        for number, layout in enumerate(layouts):
            if layout.ep == 1 or ARGUMENTS[name]["num_experts"]:
                save(name, folder / f"{name}-{number}", layout)
                key = name, layout
                found[key] = differences(name, exports[name, layout.is_te], layout)
    return found


def _check_layouts(folder, ranks, names, tmp_path):
    exports = {}
    for name in names:
        for is_te, implementation in enumerate(("local", "transformer_engine")):
            target = tmp_path / f"{name} {implementation}"
            run = _run_of(folder / name)
            exports[name, bool(is_te)] = export(str(run), target, implementation).checkpoint
    results = run_distributed(ranks, _save_and_load_each, tmp_path, exports, LAYOUTS[ranks], names)
    assert all(results) and not [found for found in results if any(found.values())]
    for name in names:
        wanted = _weights(_run_of(folder / name))
        paths = [path for path in tmp_path.glob(f"{name}-?") if path.is_dir()]
        assert len(paths) > 1
        for path in paths:
            found = _weights(_run_of(path))
            assert not [key for key in wanted if not torch.equal(found[key], wanted[key])], path


def test_two_ranks_save_and_load(saved, tmp_path):
    _check_layouts(saved[0], 2, ("deepseek",), tmp_path)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ranks", "names"), [(2, tuple(ARGUMENTS)), (4, ("deepseek", "dense_qkv"))]
)
def test_any_layout_saves_and_loads(ranks, names, saved, tmp_path):
    _check_layouts(saved[0], ranks, names, tmp_path)
