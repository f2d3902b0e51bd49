"""Files that would run code if they were trusted: the code creates a folder called `marker`."""

import json
import os
from collections.abc import Callable
from pathlib import Path


class Payload:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.marker),)


def hostile_folder(folder: Path) -> Path:
    """A tokenizer and a model for transformers; their classes are code in the folder itself.

    The code creates `folder/marker`.
    """
    hostile = folder / "hostile"
    hostile.mkdir()
    marker = str(folder / "marker")
    code = f"import os\nos.mkdir({marker!r})\nclass Tokenizer: ...\nclass Model: ...\n"
    (hostile / "hostile_code.py").write_text(code)
    classes = {
        "AutoTokenizer": ["hostile_code.Tokenizer", "hostile_code.Tokenizer"],
        "AutoConfig": "hostile_code.Model",
        "AutoModel": "hostile_code.Model",
    }
    for name, content in (
        ("tokenizer_config.json", {"tokenizer_class": "Tokenizer", "auto_map": classes}),
        ("config.json", {"model_type": "hostile", "auto_map": classes}),
        ("vocab.json", {"a": 0, "<|endoftext|>": 1}),
    ):
        (hostile / name).write_text(json.dumps(content))
    (hostile / "merges.txt").write_text("#version: 0.2\n")
    return hostile
