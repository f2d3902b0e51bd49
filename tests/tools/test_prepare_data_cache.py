"""The tool builds exactly the files that a run then finds."""

from functools import partial

from tests.distributed import run_distributed
from tests.program import SMALL, flags, pretrain_here, small_data
from tests.tools.running import run_tool_forked

run = partial(run_tool_forked, "prepare_data_cache.py")


def contents(cache):
    return {
        path.relative_to(cache): (path.stat().st_mtime_ns, path.read_bytes())
        for path in cache.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def test_a_run_finds_what_the_tool_has_built(tmp_path):
    options = SMALL | small_data(tmp_path)
    result = run(*flags(options))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == (
        f"{tmp_path}/cache is ready for 4 iterations of 8 sequences of 32 tokens from cycle, "
        "noise\n"
    )
    built = contents(tmp_path / "cache")
    assert built
    run_distributed(1, pretrain_here, [options])
    assert contents(tmp_path / "cache") == built


def test_wrong_data_is_one_line(tmp_path):
    options = SMALL | small_data(tmp_path) | {"data_path": [tmp_path / "none"]}
    result = run(*flags(options))
    assert result.returncode == 2
    assert result.stdout == ""
    assert str(tmp_path / "none") in result.stderr
    assert result.stderr.count("\n") == 1
