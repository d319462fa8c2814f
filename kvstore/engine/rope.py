"""Rope tables that transformers chooses by length: ``longrope`` and ``dynamic``.

Transformers chooses by the last position of one call and, for ``dynamic``, by earlier calls. A chunked
prefill would rotate its keys by several tables, and a request would inherit the table of the one before
it. Here a request has one table: that of a fresh model that gets the whole request in one call.
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
    """Choose the table of a rope module as transformers does, without the rotation that follows."""


def _by_length(rope_type: object) -> bool:
    """Return whether transformers changes tables of this type by length."""
    return isinstance(rope_type, str) and ("dynamic" in rope_type or rope_type == "longrope")


class RopeTables:
    """The rope modules of a model whose tables depend on length; most models have none.

    Raises:
        ConfigError: if its config asks for such tables and no module has them as transformers does.
    """

    def __init__(self, model: Any) -> None:
        self._parts: list[tuple[Any, str | None]] = []
        strange = []
        for module in model.modules():
            found = getattr(module, "rope_type", None)
            kinds = found if isinstance(found, dict) else {None: found}
            found = [(module, name) for name, kind in kinds.items() if _by_length(kind)]
            if found and not hasattr(type(module).forward, "__wrapped__"):
                strange.append(type(module).__name__)
            self._parts += found
        asked = sorted(filter(_by_length, _rope_types(model.config.to_dict())))
        if strange or (asked and not self._parts):
            msg = (
                f"rope tables depend on length ({', '.join(asked) or 'rope_type of a module'}), and "
                f"{', '.join(strange) or f'no module of {type(model).__name__}'} chooses them as "
                "transformers does, expected forwards decorated by its dynamic_rope_update; use this "
                "model without a cache"
            )
            raise ConfigError(msg)
        for module, layer_type in self._parts:
            _normalise(module, layer_type)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def reset(self) -> None:
        """Reset every module to its state before the first request."""
        for module, layer_type in self._parts:
            _choose(module, layer_type, 1)

    def digest(self, length: int) -> bytes:
        """Return a digest of the tables of a request of ``length`` tokens; empty without tables.

        Cost: some tens of microseconds for each module.
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
        """Return the largest length, up to ``most``, with the tables of a request of ``length``.

        A request never returns to an earlier table: its length only grows.

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
        """Use the tables of a request of ``length`` tokens for calls of the model in the context.

        The modules choose as if each call contained the request's last token.
        """

        def ask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            x, positions, *rest = (*args, *(kwargs.pop(n) for n in _NAMES if n in kwargs))
            layer_type = rest[0] if rest else None
            _choose(module, layer_type, 1)
            last = positions.new_full((*positions.shape[:-1], 1), length - 1)
            return (x, torch.cat([positions, last], dim=-1), *rest), kwargs

        def answer(_module: Any, _args: Any, rotation: Any) -> Any:
            if isinstance(rotation, torch.Tensor):
                return rotation[..., :-1, :]
            return tuple(part[..., :-1, :] for part in rotation)

        with ExitStack() as stack:
            for module in {id(module): module for module, _ in self._parts}.values():
                handles = (
                    module.register_forward_pre_hook(ask, with_kwargs=True),
                    module.register_forward_hook(answer),
                )
                for handle in handles:
                    stack.callback(handle.remove)
            yield


_NAMES = ("x", "position_ids", "layer_type")
"""Arguments of a rope module's forward, in order."""


def _choose(module: Any, layer_type: str | None, length: int) -> None:
    """Make a module choose its table for a call whose last token is number ``length - 1``.

    With length 1 it returns to its first table.
    """
    device = next(module.buffers()).device
    positions = torch.tensor([[length - 1]], device=device)
    arguments = {} if layer_type is None else {"layer_type": layer_type}
    with torch.no_grad():
        _update(module, positions, positions, **arguments)


def _normalise(module: Any, layer_type: str | None) -> None:
    """Give a module the attributes that transformers sets at the first change of its table.

    After that every request leaves the module in the same state.
    """
    _choose(module, layer_type, 1)
    table = getattr(module, _table_name(layer_type)).clone()
    _choose(module, layer_type, getattr(module, "original_max_seq_len", 0) + 1)
    _choose(module, layer_type, 1)
    module.register_buffer(_table_name(layer_type), table, persistent=False)


def _table_name(layer_type: str | None) -> str:
    return "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"


def _rope_types(config: Any) -> set[str]:
    """Return every rope type that a config names, at any depth."""
    if not isinstance(config, dict):
        return set()
    found = {config["rope_type"]} if isinstance(config.get("rope_type"), str) else set()
    return found.union(*map(_rope_types, config.values()))
