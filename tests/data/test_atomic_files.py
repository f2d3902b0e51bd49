import errno
import os
import signal
from pathlib import Path

import pytest

from moe_parallel.data import atomic_files
from moe_parallel.data.atomic_files import staging, uninterrupted, write_atomically


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


def test_a_full_disk_leaves_the_earlier_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "file"
    write_atomically(path, "earlier")
    monkeypatch.setattr(atomic_files, "flush_to_disk", fail)
    with pytest.raises(OSError, match="No space left") as raised:
        write_atomically(path, "later")
    assert raised.value.filename == str(path)
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "earlier"


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    (path := tmp_path / "file").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        write_atomically(path, "later")
    assert raised.value.filename == str(path) and list(tmp_path.iterdir()) == [path]
