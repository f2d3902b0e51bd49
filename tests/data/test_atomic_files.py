import os
import signal
from pathlib import Path

import pytest

from moe_parallel.data.atomic_files import staging, uninterrupted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_removes_the_staging_folder(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), staging(tmp_path / "new" / "data") as folder:
        assert folder.parent == tmp_path / "new" and folder.name.startswith(".data.writing-")
        (folder / "part").write_text("half")
        os.kill(os.getpid(), number)
    assert list((tmp_path / "new").iterdir()) == []
    assert signal.getsignal(number) == before


def test_what_was_renamed_stays(tmp_path: Path) -> None:
    with staging(tmp_path / "data") as folder:
        (folder / "whole").write_text("all")
        os.replace(folder / "whole", tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_renames_are_not_interrupted(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with uninterrupted():
        os.kill(os.getpid(), number)
    assert signal.getsignal(number) == before
