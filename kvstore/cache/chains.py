"""Chains of one namespace: block hashes of token ids under the generation in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from kvstore.cache.match import Match
from kvstore.cache.shared import SharedTiers
from kvstore.checks import several
from kvstore.errors import brief
from kvstore.identity.block import BlockHash, ImageSpan
from kvstore.identity.chain import Prefix
from kvstore.identity.hash import as_tokens, identify, namespace_digest
from kvstore.identity.namespace import Namespace


class Chains:
    """The chains of one namespace: prefixes of requests, and their matches. Threads: any."""

    def __init__(self, shared: SharedTiers, namespace: Namespace) -> None:
        self._shared = shared
        self._roots: frozenset[BlockHash] = frozenset()  # of all generations: matches stay valid
        self._bind(namespace)

    def _bind(self, namespace: Namespace) -> None:
        """Set the root of the generation in force."""
        self.lineage = self._root_of(replace(namespace, generation=0)).hex()
        generation = self._shared.generations.current(self.lineage, namespace.generation)
        self.namespace = replace(namespace, generation=generation)
        self.root = self._root_of(self.namespace)
        self._roots |= {self.root}

    def _root_of(self, namespace: Namespace) -> BlockHash:
        shared = self._shared
        return namespace_digest(
            shared.layout.fingerprint, shared.block_tokens, namespace, shared.secret
        )

    def follow(self) -> None:
        """Change to the newest generation begun by another scope of this namespace."""
        if not self._shared.generations.is_current(self.lineage, self.namespace.generation):
            self._bind(self.namespace)

    def begin_generation(self) -> int:
        """Record the next generation and change to it; return its number."""
        self.follow()
        newer = self.namespace.generation + 1
        self._shared.generations.record(self.lineage, newer)
        self._bind(replace(self.namespace, generation=newer))
        return newer

    def prefix(
        self, tokens: Sequence[int] | NDArray[np.integer], images: Sequence[ImageSpan]
    ) -> Prefix:
        """Return the prefix of a request under the generation in force.

        Raises:
            StoreError: after ``close`` or in a forked child.
            ValueError: for tokens that are not token ids, or an image span beyond them.
        """
        self._shared.check_open()
        self.follow()
        images = several(images, "images", "ImageSpan values")
        if images:
            tokens = as_tokens(tokens)
        count = len(tokens) if images else 0
        for image in images:
            given: object = image
            if not isinstance(given, ImageSpan):
                raise ValueError(f"images must be ImageSpan values, found {type(given).__name__}")
            if image.stop > count:
                msg = f"image span [{image.start}, {image.stop}) ends beyond {count} tokens"
                raise ValueError(msg)
        # A match outlives the call; the caller's buffer may not.
        ids, hashes = identify(self.root, tokens, self._shared.block_tokens, images)
        return Prefix(self.root, ids, hashes, images, self._shared.block_tokens)

    def check(self, match: object) -> Match:
        """Return a match of this namespace. Raises ``ValueError`` for anything else.

        A match of another store names blocks that are not in this one; in another namespace hashes differ.
        """
        if not isinstance(match, Match):
            raise ValueError(f"match must come from lookup, found {brief(match)}")
        if match.lookups is not self._shared.lookups:
            msg = f"the match is of another store than {self._shared.ssd.path}; look up in this one"
            raise ValueError(msg)
        if match.prefix.root not in self._roots:
            raise ValueError(
                f"the match is of another namespace than {self.namespace}; look up in the scope that reads it"
            )
        return match
