"""The Megatron-Core versions that this project supports.

The code is the same for all. A change that only the older ones need is an entry with `before=` in
`cpu_host.ADAPTATIONS`.
"""

from importlib import metadata

from packaging.specifiers import SpecifierSet

from moe_parallel.errors import InputError

#: Those of pyproject.toml. CI runs 0.16.1, the last one for Python 3.11, and 0.19.2.
SUPPORTED = ">=0.16.1,<0.20"
INSTALL = f"pip install 'megatron-core{SUPPORTED}'"


def installed_version() -> str:
    """The version of the installed megatron-core.

    Raises:
        InputError: it is not installed.
    """
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise InputError(f"megatron-core is not installed: {INSTALL}") from None


def check_megatron_version() -> str:
    """Returns the installed version of megatron-core.

    Raises:
        InputError: it is missing, or its version is not a supported one.
    """
    version = installed_version()
    if version not in SpecifierSet(SUPPORTED):
        raise InputError(
            f"megatron-core {version} is installed, and this project is written for "
            f"{SUPPORTED}: {INSTALL}"
        )
    return version
