"""Name, version and extras of the distribution, and the check for torch.

torch is an extra. A module that only handles tensors imports it at its top; its callers call :func:`require_torch`
first. A function that receives a tensor needs no check.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from kvstore.errors import ConfigError

NAME = "kvstore-llm"
"""Name on package indexes, where ``kvstore`` is another project. The import name is ``kvstore``."""
VERSION = "0.1.0"


def install_command(extra: str) -> str:
    """Return the command that installs an extra, quoted for a shell.

    It names the checkout: until a release is published, a name on an index could be another project's.
    """
    return f"pip install '.[{extra}]' (in a checkout of {NAME})"


def has_torch() -> bool:
    """Return whether torch is installed, without importing it."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):  # ValueError: a module without a spec replaces it
        return False


def require_torch() -> None:
    """Import torch. Raises ``ConfigError`` naming the extra to install, if torch cannot be imported."""
    try:
        import_module("torch")
    except ImportError as error:
        msg = f"torch cannot be imported ({error}); run: {install_command('torch')}"
        raise ConfigError(msg) from error
