"""Reads a YAML file of options: `key: value` lines with the same values as flags."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from moe_parallel.config.message import as_typed, shown
from moe_parallel.config.option import number
from moe_parallel.errors import InputError
from moe_parallel.reading import read_small

_BYTES_MAX, _LEVELS_MAX = 1 << 20, 50  # far above any configuration


class _Loader(yaml.SafeLoader):
    """PyYAML's loader with the numbers of the command line.

    In YAML 1.1 010 is 8, 1:30 is 90 and 1_0 is 10. Here, anything but a decimal number is text.
    PyYAML's loader in C is faster, but a file that is nested too deeply ends the process there.
    An alias (`*name`) may stand for one value. Of lists and maps that hold each other, a few lines
    are endless.
    """

    _level = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        alias = self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > _LEVELS_MAX:
            raise ValueError("it is nested too deeply")
        node = super().compose_node(parent, index)
        self._level -= 1
        if alias and not isinstance(node, yaml.ScalarNode):
            raise ValueError("an alias stands for a list or a map: write it out")
        return node


def _number(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float | str:
    text = str(node.value)
    value = number(text)
    if value is None:
        return _SPECIAL.get(text.lower(), text)
    return value


_SPECIAL: dict[str, int | float | str] = {".inf": math.inf, "-.inf": -math.inf, ".nan": math.nan}


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


def read_yaml(path: Path, flag: str = "--config ") -> dict[str, Any]:
    """The raw values of a YAML file, by option name. Keys are flags without the leading dashes.

    `flag`: begins a message.

    Raises InputError if the file cannot be read, has anything but `key: value` lines, or has a key
    twice.
    """
    name = str(path)
    file = f"{flag}{name if name.isprintable() else shown(name)}"  # the full name, to find it
    text = _text(path, file)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        content = None if node is None else loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{file} is not valid YAML: {_one_line(error)}") from None
    except (AttributeError, LookupError, TypeError):  # PyYAML, for a wrong tag
        raise InputError(f"{file} is not valid YAML: a value does not fit its !!tag") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
        raise InputError(f"{file} must hold lines of the form `key: value`")
    names = Counter(str(key.value).replace("_", "-") for key, _ in node.value)
    for name, times in names.items():
        if times > 1:
            raise InputError(f"{file} gives {as_typed(name)} twice: keep one of the lines")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _text(path: Path, file: str) -> str:
    try:
        return read_small(path, _BYTES_MAX).decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"{file} does not exist: name a YAML file") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8 text (byte {error.start})") from None
    except ValueError as error:
        raise InputError(f"{file} is {error}: name a YAML file") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
