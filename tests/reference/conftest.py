"""A stand-in cache and codec, until the real ones land."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import torch

import kvstore
sys.path.insert(0, "/tmp"); from plan_ref import floors as plan_floors


torch.set_num_threads(1)
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _nib(x: np.ndarray) -> np.ndarray:
    a = np.abs(x)
    c = (
        (a > 0.25).astype(np.uint8) + (a >= 0.75) + (a > 1.25) + (a >= 1.75) + (a > 2.5)
        + (a >= 3.5) + (a > 5)
    )
    return (c | (np.signbit(x) << 3)).astype(np.uint8)


def pack(values: Any, fmt: str, *, scale_rule: str, out: Any = None) -> Any:
    b = 16 if fmt == "nvfp4" else 32
    v = values.reshape(*values.shape[:-1], -1, b)
    amax = np.abs(v).max(-1, keepdims=True)
    if fmt == "nvfp4":
        s8 = torch.from_numpy(np.maximum(amax, 6 * 2**-9) / np.float32(6)).to(torch.float8_e4m3fn)
        scale, codes = s8.float().numpy(), s8.view(torch.uint8).numpy()
    else:
        e = np.clip(((amax.astype(np.float32).view(np.uint32) + 0x3FFFFF) >> 23).astype(int) - 2, 0, 254)
        scale, codes = np.exp2(e - 127.0).astype(np.float32), e.astype(np.uint8)
    n = _nib(v / scale).reshape(values.shape)
    return n[..., ::2] | (n[..., 1::2] << 4), codes[..., 0]


def unpack(nib: Any, scales: Any, fmt: str, *, dtype: str, out: Any = None) -> Any:
    b = 16 if fmt == "nvfp4" else 32
    n = np.stack([nib & 15, nib >> 4], -1).reshape(*nib.shape[:-1], -1)
    v = GRID[n & 7] * np.where(n & 8, -1, 1).astype(np.float32)
    if fmt == "nvfp4":
        s = torch.from_numpy(scales).view(torch.float8_e4m3fn).float().numpy()
    else:
        s = np.exp2(scales.astype(np.float32) - 127)
    return v * np.repeat(s, b, -1)


if not hasattr(kvstore, "fp4"):
    mod = types.ModuleType("kvstore.fp4")
    mod.pack, mod.unpack = pack, unpack  # type: ignore
    sys.modules["kvstore.fp4"] = mod
    kvstore.fp4 = mod  # type: ignore


class Entries(dict):
    tokens = 0


class Fake:
    def __init__(self, layout: Any, rows: int = 128, bt: int = 128) -> None:
        self.layout, self.rows, self.bt = layout, rows, bt
        self.blocks: dict[bytes, Any] = {}
        self.pool: dict[bytes, Any] = {}
        self.device = self

    def lookup(self, tokens: Any) -> Any:
        limit = max(0, len(tokens) - 1) // self.bt
        h = 0
        while h < limit and tokens[: (h + 1) * self.bt].tobytes() in self.blocks:
            h += 1
        h *= self.bt
        snap = self.pool.get(tokens[:h].tobytes()) if h else None
        f = plan_floors(h, self.layout.window_tokens, snap.start if snap else None)
        m = Match()
        m.__dict__.update(
            tokens=tokens, hit_tokens=h, window_hit=snap is not None, snap=snap,
            replay_start=f.replay_start, read_floor=f.read_floor, write_floor=f.write_floor,
            window_write_floor=f.window_write_floor,
        )
        return m

    def read(self, m: Any) -> Any:
        e = Entries()
        for g in self.layout.global_groups:
            e[g.name] = np.concatenate(
                [self.blocks[m.tokens[: b + self.bt].tobytes()][g.name] for b in range(0, m.hit_tokens, self.bt)], 1
            )
        e.tokens = m.hit_tokens
        return e

    def load(self, m: Any) -> Any:
        e = self.read(m)
        e.release = lambda: None
        return e

    def gather(self, pages: Any, group: str, layer: int, idx: Any, dtype: Any) -> Any:
        from kvstore.reference.formats import unpack_entries

        g = self.layout.group(group)
        v = unpack_entries(g, pages[group][g.layers.index(layer)], dtype)
        if idx is None:
            return v
        return torch.where((idx >= 0)[..., None], v[idx.clamp(min=0)], torch.zeros((), dtype=dtype))

    def window(self, m: Any, hook: Any) -> Any:
        if m.snap is not None:
            return m.snap
        [s] = hook([
            kvstore.ReplayRequest(
                start=m.replay_start, stop=m.hit_tokens, read_floor=m.read_floor, write_floor=m.write_floor,
                window_write_floor=m.window_write_floor, tokens=m.tokens, pages=self.load(m),
            )
        ])
        return s

    def flush(self): pass

    def store(self, tokens: Any, entries: Any, start: int = 0) -> None:
        for b in range(start, len(tokens) // self.bt * self.bt, self.bt):
            key = tokens[: b + self.bt].tobytes()
            self.blocks.setdefault(key, {
                g.name: entries[g.name][:, (b - start) // g.tokens_per_entry : (b + self.bt - start) // g.tokens_per_entry].copy()
                for g in self.layout.global_groups
            })

    def put_window(self, tokens: Any, snap: Any) -> None:
        key = tokens[: snap.stop].tobytes()
        if key in self.pool and snap.source == "replay":
            return
        first = max(snap.start, snap.stop - self.rows)
        self.pool[key] = kvstore.WindowSnapshot(
            first, snap.stop, {n: r[:, first - snap.start :].copy() for n, r in snap.rows.items()}, "pool"
        )


class Match:
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *a: Any) -> None:
        pass


LOGITS_EQUAL = 1e-9
"""Logits that differ by less are equal: matrix products may round differently for other shapes."""


def prompt_tokens(length: int, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.uint32)


def difference(one: Any, other: Any) -> float:
    return float((one.logits - other.logits).abs().max())


def entries_equal(one: Any, other: Any, *, start: int = 0, stop: int | None = None) -> bool:
    """Say whether the entries of tokens ``[start, stop)`` are byte-equal, by default to the end."""
    for ratio in (1, 2):
        for kind in ("main", "index"):
            name = f"{kind}_r{ratio}"
            parts = []
            for result in (one, other):
                skip = result.entries_start // ratio
                end = None if stop is None else stop // ratio - skip
                parts.append(result.entries[name][:, start // ratio - skip : end])
            if not np.array_equal(*parts):
                return False
    return True


import contextlib


@contextlib.contextmanager
def open_cache(path, config, *, window_rows=128, block_tokens=128, dtype=torch.float64):
    yield Fake(config.layout(dtype), window_rows, block_tokens)
