"""The Megatron-Core versions that this project supports.

The code is the same for both. A change that only one version needs is an entry with `versions=`
in `cpu_host.ADAPTATIONS`.
"""

from importlib import metadata

from moe_parallel.errors import InputError

#: 0.16.1 is the newest for Python 3.10 and 3.11, 0.19.2 the newest for 3.12 and later.
SUPPORTED = ("0.16.1", "0.19.2")


def installed_version() -> str:
    """The version of the installed megatron-core.

    Raises:
        InputError: it is not installed.
    """
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        raise InputError(f"megatron-core is not installed: {_install_command()}") from None


def check_megatron_version() -> str:
    """Returns the installed version of megatron-core.

    Raises:
        InputError: it is missing, or its version is not a supported one.
    """
    version = installed_version()
    if version not in SUPPORTED:
        raise InputError(
            f"megatron-core {version} is installed, and this project is written for "
            f"{' and '.join(SUPPORTED)}: {_install_command()}"
        )
    return version


def _install_command() -> str:
    requirements = (
        f"'megatron-core=={SUPPORTED[0]}; python_version < \"3.12\"'",
        f"'megatron-core=={SUPPORTED[1]}; python_version >= \"3.12\"'",
    )
    return f"pip install {' '.join(requirements)}"
