"""Rope tables that transformers chooses by length: ``longrope`` and ``dynamic``.

Transformers chooses by the last position of one call and, for ``dynamic``, by earlier calls. A chunked
prefill would rotate its keys by several tables, and a request would inherit the table of an earlier one.
Here a request has one table: that of a newly loaded model called once with the whole request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers.modeling_rope_utils import dynamic_rope_update

from kvstore.errors import ConfigError


@dynamic_rope_update  # type: ignore[untyped-decorator]
def _update(*_: object, **__: object) -> None:
    """Choose the table of a rope module as transformers does, without rotating."""


def _by_length(rope_type: object) -> bool:
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


class RopeTables:
    """Rope modules of a model whose tables depend on length; most models have none.

    Raises:
        ConfigError: if the config requires such tables, and no module chooses them as transformers does.
    """

    def __init__(self, model: Any) -> None:
        self._parts: list[tuple[Any, str | None]] = []
        unsupported = []
        for module in model.modules():
            found = getattr(module, "rope_type", None)
            kinds = found if isinstance(found, dict) else {None: found}
            found = [(module, name) for name, kind in kinds.items() if _by_length(kind)]
            if found and not hasattr(type(module).forward, "__wrapped__"):
                unsupported.append(type(module).__name__)
            self._parts += found
        types = sorted(filter(_by_length, _rope_types(model.config.to_dict())))
        if unsupported or (types and not self._parts):
            forwards = f"undecorated forwards of {', '.join(unsupported)}"
            msg = (
                f"rope tables depend on length ({', '.join(types) or 'rope_type of a module'}): found "
                f"{forwards if unsupported else f'no such module in {type(model).__name__}'}, expected "
                "forwards decorated by transformers' dynamic_rope_update; use this model without a cache"
            )
            raise ConfigError(msg)
        for module, layer_type in self._parts:
            _normalize(module, layer_type)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def reset(self) -> None:
        """Reset every module to its state before the first request."""
        for module, layer_type in self._parts:
            _choose(module, layer_type, 1)

    def digest(self, length: int) -> bytes:
        """Return a digest of the tables for ``length`` tokens, empty without tables.

        Cost: some tens of microseconds per module.
        """
        if not self._parts:
            return b""
        digest = hashlib.sha256(b"kvstore.rope.1")
        for module, layer_type in self._parts:
            _choose(module, layer_type, 1)
            _choose(module, layer_type, length)
            table = getattr(module, _table_name(layer_type))
            digest.update(table.detach().double().cpu().numpy().tobytes())
            digest.update(repr(getattr(module, "attention_scaling", None)).encode())
        self.reset()
        return digest.digest()

    def last_under(self, length: int, most: int) -> int:
        """Return the largest length, up to ``most``, with the tables of ``length``.

        Lengths only grow, so a request never returns to an earlier table.

        Cost: two digests, or about twenty if the table changes.
        """
        if most <= length or not self._parts:
            return most
        table = self.digest(length)
        if self.digest(most) == table:
            return most
        kept, left = length, most
        while left - kept > 1:
            middle = (kept + left) // 2
            kept, left = (middle, left) if self.digest(middle) == table else (kept, middle)
        return kept

    @contextmanager
    def request(self, length: int) -> Iterator[None]:
        """Use the tables of a request of ``length`` tokens for model calls in the context."""

        # Modules choose by the last position of a call, so the request's last one is added to each.
        def add_last(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, positions, *rest = (*args, *(kwargs.pop(n) for n in _NAMES if n in kwargs))
            layer_type = rest[0] if rest else None
            _choose(module, layer_type, 1)
            last = positions.new_full((*positions.shape[:-1], 1), length - 1)
            return (x, torch.cat([positions, last], dim=-1), *rest), kwargs

        def drop_last(_module: Any, _args: Any, rotation: Any) -> Any:
            if isinstance(rotation, torch.Tensor):
                return rotation[..., :-1, :]
            return tuple(part[..., :-1, :] for part in rotation)

        with ExitStack() as stack:
            for module in {id(module): module for module, _ in self._parts}.values():
                handles = (
                    module.register_forward_pre_hook(add_last, with_kwargs=True),
                    module.register_forward_hook(drop_last),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            yield


_NAMES = ("x", "position_ids", "layer_type")
"""Arguments of a rope module's forward, in order."""


def _choose(module: Any, layer_type: str | None, length: int) -> None:
    """Make a module choose its table for ``length`` tokens; with length 1 its first table."""
    device = next(module.buffers()).device
    positions = torch.tensor([[length - 1]], device=device)
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    with torch.no_grad():
        _update(module, positions, positions, **arguments)


def _normalize(module: Any, layer_type: str | None) -> None:
    """Set the attributes that transformers sets at the first change of a table.

    After this, every request leaves the module in the same state.
    """
    _choose(module, layer_type, 1)
    table = getattr(module, _table_name(layer_type)).clone()
    _choose(module, layer_type, getattr(module, "original_max_seq_len", 0) + 1)
    _choose(module, layer_type, 1)
    module.register_buffer(_table_name(layer_type), table, persistent=False)


def _table_name(layer_type: str | None) -> str:
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"


def _rope_types(config: Any) -> set[str]:
    """Return all rope types in a config, at any depth."""
    if not isinstance(config, dict):
        return set()
    found = {config["rope_type"]} if isinstance(config.get("rope_type"), str) else set()
    return found.union(*map(_rope_types, config.values()))
