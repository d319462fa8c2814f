"""Manifest of an archive: store format, namespaces, and generations of their weights."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore.admin.access import InspectedStore, parse_frames
from kvstore.admin.archive.tar import Member, Members
from kvstore.blocks.keys import KEYS_NAMESPACE, keys_root
from kvstore.distribution import VERSION
from kvstore.errors import ConfigError, StoreError
from kvstore.frame.format import Frames
from kvstore.identity.block import BlockHash
from kvstore.identity.hash import namespace_digest
from kvstore.identity.namespace import Namespace
from kvstore.store.generations import LAST_GENERATION
from kvstore.store.secret import secret_of
from kvstore.store.store_format import StoreFormat, format_text
from kvstore.tier.ssd.version_file import FORMAT_BYTES

ARCHIVE_VERSION = 1
MANIFEST = "manifest.json"
MANIFEST_BYTES = 16 << 20
"""Largest manifest: some 30,000 namespaces."""
_IDENTITY = ("model", "weights", "tokenizer", "adapter", "tenant", "generation")
_NUMBER = re.compile("[0-9]{1,10}")


def encode_manifest(store: InspectedStore, spaces: Mapping[int, Mapping[str, Any]]) -> bytes:
    """Return the manifest of some namespaces, by number, as JSON."""
    lines = (_line(store.form, space, store.secret) for space in spaces.values())
    generations = {}
    for line in lines:
        text = store.ssd.fact(f"generation:{line}") if line else None
        if line and text is not None and text.isdigit():
            generations[line] = int(text)
    return json.dumps(
        {
            "kvstore_archive": ARCHIVE_VERSION,
            "kvstore": VERSION,
            "format": store.ssd.options.format_text,
            "layout": (store.ssd.fact("layout") or b"").decode(errors="replace"),
            "namespaces": {str(number): space for number, space in spaces.items()},
            "generations": generations,
        },
        indent=1,
    ).encode()


def _root(form: StoreFormat, space: Mapping[str, Any], secret: bytes | None) -> BlockHash | None:
    """Return the parent hash of a namespace's first blocks, None if the identity is incomplete."""
    if form.key_bytes:
        return keys_root(secret)
    try:
        namespace = Namespace(**{name: space[name] for name in _IDENTITY})
    except (KeyError, ConfigError):
        return None
    return namespace_digest(form.layout.fingerprint, form.block_tokens, namespace, secret)


def _line(form: StoreFormat, space: Mapping[str, Any], secret: bytes | None) -> str | None:
    """Return the name under which the generations of a namespace's weights are recorded."""
    first = _root(form, {**space, "generation": 0}, secret)
    return None if first is None or form.key_bytes else first.hex()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Checked manifest, with the roots of its namespaces in the target store."""

    form: StoreFormat
    frames: Frames
    text: str
    layout: str
    spaces: Mapping[int, Mapping[str, Any]]
    roots: Mapping[int, BlockHash]
    keys_root: BlockHash | None
    generations: Mapping[str, int]


def read_manifest(file: Path, members: Members, first: Member | None, target: Path) -> Manifest:
    """Read the first member of an archive for the store at ``target``.

    Raises:
        StoreError: if it is no manifest, or one of a store with a secret that ``target`` lacks.
        LayoutMismatch: if the store at ``target`` has another format.
    """
    what = f"{file} is not an archive of a store"
    found = _parsed(file, what, members, first)
    text: str = found["format"]
    form, frames = parse_frames(text)
    if text != format_text(form):
        raise StoreError(f"{what}: its format is not in the canonical form of a store")
    secret = secret_of(target, text)
    spaces, roots = {}, {}
    for number, space in found["namespaces"].items():
        root = _root(form, space, secret) if isinstance(space, dict) else None
        if root is not None and isinstance(number, str) and _NUMBER.fullmatch(number):
            names = () if form.key_bytes else _IDENTITY
            spaces[int(number)] = {name: space[name] for name in names} or dict(KEYS_NAMESPACE)
            roots[int(number)] = root
    lines = {_line(form, space, secret) for space in spaces.values()}
    newest = {line: value for line, value in found["generations"].items() if line in lines}
    for value in newest.values():
        if type(value) is not int or not 0 <= value < LAST_GENERATION:
            msg = f"{what}: its {MANIFEST} has generation {str(value)[:40]}, expected an integer in [0, {LAST_GENERATION})"
            raise StoreError(msg)
    above = keys_root(secret) if form.key_bytes else None
    return Manifest(form, frames, text, found["layout"], spaces, roots, above, newest)


def _parsed(file: Path, what: str, members: Members, first: Member | None) -> dict[str, Any]:
    """Return the fields of a manifest, with checked types. Raises ``StoreError``."""
    if first is None or first.name != MANIFEST or not first.is_file:
        msg = f"{what}: its first member is {first.name[:80] if first else None!r}, expected {MANIFEST!r}"
        raise StoreError(msg)
    if first.size > MANIFEST_BYTES:
        msg = f"{what}: its manifest has {first.size} bytes, expected at most {MANIFEST_BYTES}"
        raise StoreError(msg)
    try:
        found = json.loads(members.read(first))
        version, text = found["kvstore_archive"], found["format"]
        fields = {
            "format": text,
            "namespaces": dict(found["namespaces"]),
            "generations": dict(found.get("generations", {})),
            "layout": str(found.get("layout", "")),
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StoreError(f"{what}: its manifest is damaged: {error!r}") from error
    if type(version) is not int or version != ARCHIVE_VERSION:
        msg = f"{file} was written by another version: found archive version {version!r}, expected {ARCHIVE_VERSION}"
        raise StoreError(msg)
    if not isinstance(text, str) or len(text) > FORMAT_BYTES:
        raise StoreError(f"{what}: its format is no text of up to {FORMAT_BYTES} bytes")
    return fields
