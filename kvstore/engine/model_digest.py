"""Identity of a transformers model: a digest of all its state that decides keys and values."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
import transformers
import xxhash
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

from kvstore.engine.rope import RopeTables
from kvstore.errors import ConfigError

WHOLE = 1024
"""Most numbers of a tensor that is compared whole at each request: rope tables, scales, biases."""
SAMPLES = 32
"""Evenly spaced numbers of a larger tensor that are compared. Each is a miss of the processor's caches:
64 made up half of a request's comparison time, for a model of 300 tensors."""

_LABELS = frozenset(
    {
        *("_commit_hash", "_ep_plan", "_fsdp_plan", "_is_hf_initialized", "_name_or_path"),
        *("_pp_plan", "_tp_plan", "_use_kernels", "_weight_conversions", "architectures", "dtype"),
        *("model_type", "name_or_path", "torch_dtype", "transformers_version", "warnings_issued"),
    }
)
"""Attributes that change no computation, or repeat facts of the parameters."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_SKIPPED = _LABELS | (frozenset(vars(torch.nn.Module())) - {"training"})
"""Attributes of a module that are read separately, or do not decide its forward."""
_PLAIN = (str, int, float, complex, bytes, type(None), torch.dtype, torch.device, Enum)
_DENSE = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_DEEPEST = 12
"""Most levels of nested containers that are read; ends the walk of a container that contains itself."""


@dataclass(frozen=True, slots=True)
class _State:
    """Present state of a model; equal states compute equal keys and values."""

    settings: bytes
    """Digest of classes, attributes and settings of torch; equal in every process."""
    stamps: Mapping[str, tuple[object, ...]]
    """Stamps by tensor name, which change with the tensor; valid in this process only."""


class ModelIdentity:
    """Identity of a model, updated at changes of the model. Threads: one at a time.

    ``given`` names the model's present state; without it, every number of the model is read.

    Raises:
        ConfigError: if some tensors of the model are not in memory.
    """

    def __init__(self, model: Any, given: str | None = None) -> None:
        self._model = model
        self.ropes = RopeTables(model)
        self._digests: dict[str, tuple[object, bytes]] = {}
        self._given = given
        self._first = self._last = self._update(None)

    def weights(self, length: int = 1) -> str:
        """Return ``Namespace.weights`` of the model's present state, for a request of ``length`` tokens.

        It covers parameters and buffers, adapters, attributes of modules, the config, hooks, settings
        of torch, and the rope tables that transformers uses for this length. A write that bypasses
        autograd (through ``.data`` or NumPy) is not detected in numbers that are not sampled.

        Cost: without a change one walk of the modules and one copy of the samples, 4 to 10
            microseconds per module; changed tensors are read whole.

        Raises:
            ConfigError: if the model is in training mode with dropout: its results are random.
        """
        self._last = self._update(self._last)
        table = self.ropes.digest(length)
        return self._weights if table == self.ropes.digest(1) else f"{self._weights}+{table.hex()}"

    def _update(self, last: _State | None) -> _State:
        """Return the present state; compute its name if it differs from ``last``."""
        self.ropes.reset()
        state, tensors = _read(self._model)
        if last is None and self._given is not None:
            self._weights = self._given
        elif state != last:
            self._weights = self._name(state, tensors)
        return state

    def _name(self, state: _State, tensors: Mapping[str, torch.Tensor]) -> str:
        """Return the name of a state: a digest of all tensors, or ``given`` and one of changed tensors."""
        if self._given is not None and state == self._first:
            return self._given
        digest = hashlib.sha256(b"kvstore.model.3" + state.settings)
        for name, stamp in sorted(state.stamps.items()):
            if self._given is None or self._first.stamps.get(name) != stamp:
                content = self._content(name, stamp, tensors[name])
                digest.update(f"{len(name)}:{name}".encode() + content)
        found = digest.hexdigest()
        return found if self._given is None else f"{self._given}+{found}"

    def _content(self, name: str, stamp: object, tensor: torch.Tensor) -> bytes:
        known, content = self._digests.get(name, (None, b""))
        if known != stamp:
            content = _content(name, tensor)
            self._digests[name] = (stamp, content)
        return content


@torch.no_grad()
def _read(model: Any) -> tuple[_State, dict[str, torch.Tensor]]:
    """Return the state of a model, and its tensors by name."""
    tensors: dict[str, torch.Tensor] = {}
    lines = [f"transformers {transformers.__version__}", *_torch_settings(model)]
    describe = _Description(tensors).of
    for name, module in model.named_modules():
        _check_dropout(name, module)
        lines.append(f"{name} {_name_of(type(module))}")
        named = {**module._parameters, **module._buffers}  # noqa: SLF001 - cheaper than the methods
        for key, tensor in named.items():
            if tensor is not None:
                tensors[f"{name}.{key}"] = tensor
        values = vars(module)
        for key in sorted(values.keys() - _SKIPPED):
            lines += (f"{key}={describe(values[key], f'{name}.{key}')}",)
        for key in _HOOKS:
            if values[key]:  # without their keys, which differ between processes
                lines += (f"{key}={describe(list(values[key].values()), f'{name}.{key}')}",)
    parts = dict(part for name, tensor in tensors.items() for part in _flat(name, tensor))
    settings = hashlib.sha256("\n".join(lines).encode()).digest()
    return _State(settings, _stamps(parts)), parts


def _torch_settings(model: Any) -> Iterator[str]:
    """Yield the settings of torch that choose dtypes or kernels, without facts of the machine."""
    device = model.device.type
    is_casting = torch.is_autocast_enabled(device)
    yield f"autocast {is_casting} {torch.get_autocast_dtype(device)}"
    yield f"default {torch.get_default_dtype()} {_matmul_precision()}"
    cuda = torch.backends.cuda
    sdp = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.math_sdp_enabled)
    yield f"sdp {[bool(is_on()) for is_on in (*sdp, cuda.cudnn_sdp_enabled)]}"  # type: ignore[no-untyped-call]
    yield f"mkldnn {torch.backends.mkldnn.enabled} {torch.are_deterministic_algorithms_enabled()}"


def _matmul_precision() -> list[str]:
    backends = (torch.backends.cuda.matmul, getattr(torch.backends.mkldnn, "matmul", None))
    found = [getattr(backend, "fp32_precision", "") for backend in backends]
    if not all(found):  # before torch 2.9; later versions may raise here
        return [torch.get_float32_matmul_precision()]
    return [name.replace("none", "ieee") for name in found]  # two names of one precision


def _check_dropout(name: str, module: Any) -> None:
    if not module.training:
        return
    rates = [module.p] if isinstance(module, _DropoutNd) else []
    rates += [getattr(module, "attention_dropout", 0)]
    if any(isinstance(rate, float) and rate > 0 for rate in rates):
        msg = (
            f"{name or type(module).__name__} is in training mode with dropout {max(rates)}, so no two "
            "runs compute the same keys and values; call model.eval() first"
        )
        raise ConfigError(msg)


@dataclass(frozen=True, slots=True)
class _Description:
    """Describes values as text, equal for equal computations, and collects their tensors."""

    tensors: dict[str, torch.Tensor]
    seen: dict[int, str] = field(default_factory=dict)
    """Descriptions by ``id``, because every layer refers to the same config."""

    def of(self, value: Any, name: str, depth: int = 0) -> str:
        known = self.seen.get(id(value))  # first, because isinstance of a config is slow
        if known is not None:
            return known
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, torch.Tensor):
            self.tensors[name] = value
            return "tensor"
        if depth == _DEEPEST or isinstance(value, torch.nn.Module | ModuleType):
            return _name_of(type(value))
        if isinstance(value, dict):
            items = {str(k): v for k, v in value.items() if k not in _LABELS}
            return repr({k: self.of(items[k], f"{name}.{k}", depth + 1) for k in sorted(items)})
        if isinstance(value, list | tuple):
            return repr([self.of(v, f"{name}.{i}", depth + 1) for i, v in enumerate(value)])
        if isinstance(value, set | frozenset):
            return repr(sorted(map(str, value)))
        self.seen[id(value)] = text = _name_of(type(value))
        if isinstance(value, PreTrainedConfig) or is_dataclass(value):
            text += self.of(vars(value), name, depth)
        elif callable(value):
            text = self._of_function(value, name, depth)
        self.seen[id(value)] = text
        return text

    def _of_function(self, value: Any, name: str, depth: int) -> str:
        """Return a description of a function with its closure and bound values."""
        inner = getattr(value, "__func__", getattr(value, "func", value))
        code = getattr(inner, "__code__", None)
        cells = [cell.cell_contents for cell in getattr(inner, "__closure__", None) or ()]
        owner = getattr(value, "__self__", None)
        held = owner if isinstance(owner, torch.nn.Module | ModuleType) else vars(owner or value)
        bound = [getattr(inner, "__defaults__", None), getattr(value, "args", None), cells, held]
        text = "" if code is None else hashlib.sha256(code.co_code).hexdigest()
        return f"{_name_of(inner)} {text} {self.of(bound, name, depth)}"


def _name_of(kind: Any) -> str:
    found = kind if hasattr(kind, "__qualname__") else type(kind)
    return f"{found.__module__}.{found.__qualname__}"


def _flat(name: str, tensor: torch.Tensor) -> Iterable[tuple[str, torch.Tensor]]:
    """Return the plain tensors of a tensor; a quantized one has several."""
    if type(tensor) in _DENSE or not hasattr(tensor, "__tensor_flatten__"):
        return [(name, tensor)]
    inner, context = tensor.__tensor_flatten__()
    kind = f"{name}<{_name_of(type(tensor))} {context}>"
    return [part for key in inner for part in _flat(f"{kind}.{key}", getattr(tensor, key))]


def _stamps(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[object, ...]]:
    """Return a stamp of each tensor, which changes with the tensor.

    It has all numbers of a small tensor; of a large one the address, autograd's count of writes, and a
    sample.
    """
    samples: dict[tuple[object, ...], list[torch.Tensor]] = defaultdict(list)
    owners: dict[tuple[object, ...], list[tuple[str, int]]] = defaultdict(list)
    stamps: dict[str, tuple[object, ...]] = {}
    for name, tensor in tensors.items():
        kind, count = (tensor.dtype, tensor.device), tensor.numel()
        stamps[name] = (*kind, tensor.shape)
        if count > WHOLE:
            written = 0 if tensor.is_inference() else tensor._version  # noqa: SLF001
            stamps[name] += (tensor.data_ptr(), written)
        if count and not tensor.is_meta:
            samples[kind].append(_sample(tensor, count))
            owners[kind].append((name, len(samples[kind][-1])))
    for owner, parts in samples.items():
        joined = torch.cat(parts).cpu().view(torch.uint8).numpy()  # one copy for each device
        at, size = 0, len(joined) // sum(map(len, parts))
        for name, count in owners[owner]:
            stamps[name] += (joined[at : at + count * size].tobytes(),)
            at += count * size
    return stamps


def _sample(tensor: torch.Tensor, count: int) -> torch.Tensor:
    """Return the numbers of a small tensor, or a sample of a large one; a view if it is dense."""
    step = 1 if count <= WHOLE else count // SAMPLES
    if tensor.is_contiguous():
        return tensor.as_strided((-(-count // step),), (step,))
    return tensor.reshape(-1)[::step]


def _content(name: str, tensor: torch.Tensor) -> bytes:
    """Return a digest of all numbers of a tensor, with its type and shape."""
    if tensor.is_meta:
        msg = (
            f"{name} is not in memory (offloaded), expected every parameter of the model in memory; load "
            "the model without offloading, or give a namespace with a name of its weights"
        )
        raise ConfigError(msg)
    kind = f"{tensor.dtype}{list(tensor.shape)}".encode()
    if not tensor.numel():
        return kind
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return kind + xxhash.xxh3_128_digest(flat.numpy().data)
