"""Hides from Python what a GPU host without a network may lack: packages that are neither needed to
train nor carried there (tools/gpu/pack.sh). Python imports this module when it starts."""

import sys
from importlib.machinery import PathFinder

HIDDEN = (
    "accelerate", "datasets", "faiss", "lm_eval", "pyarrow", "pytest_timeout", "safetensors",
    "scipy", "sentencepiece", "transformers", "wandb", "zstandard",
)  # fmt: skip


class HidingFinder(PathFinder):
    """The finder of installed packages, without those that are hidden."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname in HIDDEN else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = HidingFinder
