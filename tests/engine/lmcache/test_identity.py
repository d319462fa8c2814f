"""The contract of identity for LMCache: its own token hasher, keys, controllers and memory objects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.require import engine
from tests.identity_contract import IdentityContract

engine("lmcache", "lmcache.v1.distributed.storage_manager", "tests.engine.lmcache.engine")

from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey, ipc_key_to_object_keys
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.token_hasher import TokenHasher

from kvstore import ConfigError
from kvstore.engine.lmcache.keys import check_keys
from tests.engine.lmcache.engine import Server

pytestmark = pytest.mark.filterwarnings("ignore")

CHUNK, CHUNKS = 16, 4
BLIND = "the server sees keys and shapes, not the engine's settings: 'revision' names them (docs)"


class Side:
    """A prompt, the engine that asks for it, and the server that is asked."""

    def __init__(self) -> None:
        self.key: dict[str, Any] = {"model_name": "m", "world_size": 2, "worker_id": 0}
        self.ids = list(range(CHUNK * CHUNKS))
        self.chunk = CHUNK
        self.group = 0
        self.width, self.dtype = 32, torch.bfloat16
        self.options: dict[str, Any] = {}

    def keys(self) -> list[ObjectKey]:
        hashes = TokenHasher(self.chunk).compute_chunk_hashes(self.ids)
        key = IPCCacheServerKey(
            token_ids=tuple(self.ids), start=0, end=len(self.ids), request_id="r", **self.key
        )
        found: list[ObjectKey] = ipc_key_to_object_keys(key, hashes, [self.group])[0]
        return found

    def desc(self) -> Any:
        return MemoryLayoutDesc([torch.Size([2, 3, self.chunk, self.width])], [self.dtype])


class L2:
    """LMCache's adapter, as the contract asks it."""

    absent: dict[str, str] = {  # noqa: RUF012 - as the contract has it
        "tokenizer": "LMCache hashes token ids (TokenHasher), which no tokenizer is part of",
        "adapter": "no key of LMCache names a LoRA: a 'cache_salt' for each has to (docs/lmcache.md)",
        "positions": BLIND,
        "compute": BLIND,
        "images": "LMCache's connector writes a digest of the image over its ids before it hashes "
        "(apply_mm_hashes_to_token_ids): row 'tokens'; vLLM's own connector does not (docs)",
        "generation": "weights are not replaced under a server: another 'revision', row 'weights'",
    }

    def served(self, path: Path, row: str | None) -> int:
        one, other = Side(), Side()
        with Server(path, **one.options) as server:
            server.store(one.keys(), one.desc())
        if row is not None:
            getattr(self, row)(other)
        with Server(path, sizes=2, **other.options) as server:
            hits, found = server.fetch(other.keys(), other.desc())
            assert len(found) == hits
        return hits * CHUNK

    def tokens(self, side: Side) -> None:
        side.ids[0] += 1

    def layout(self, side: Side) -> None:
        side.dtype = torch.float16

    def windows(self, side: Side) -> None:
        side.group = 1  # LMCache makes a group of each kind of layer, windows among them

    def block_tokens(self, side: Side) -> None:
        side.chunk, side.width = 2 * CHUNK, 16  # objects of as many bytes

    def weights(self, side: Side) -> None:
        side.options["revision"] = "2"

    def rank(self, side: Side) -> None:
        side.key["worker_id"] = 1

    def tenant(self, side: Side) -> None:
        side.options["tenant"] = "another"

    def secret(self, side: Side) -> None:
        side.options["secret"] = True


class TestIdentity(IdentityContract):
    adapter = L2()


OTHERS: list[dict[str, Any]] = [
    {"model_name": "n"},
    {"world_size": 4},
    {"cache_salt": "another"},
]


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other)))
def test_lmcaches_own_keys_keep_apart(other: dict[str, Any], tmp_path: Path) -> None:
    one, two = Side(), Side()
    two.key |= other
    with Server(tmp_path) as server:
        server.store(one.keys(), one.desc())
    with Server(tmp_path) as server:
        assert server.fetch(two.keys(), two.desc())[0] == 0
        assert server.fetch(one.keys(), one.desc())[0] == CHUNKS


def test_hashes_are_the_same_in_every_process_by_default() -> None:
    """Else nothing would hit after a restart, and no one would be told."""
    first = TokenHasher(CHUNK).compute_chunk_hashes(list(range(CHUNK)))[0]
    assert first.hex().startswith("32748aa00c5090e4f0e1f149078a0738")


def test_keys_that_do_not_tell_prompts_or_workers_apart_are_refused(tmp_path: Path) -> None:
    short = TokenHasher(CHUNK, "builtin").compute_chunk_hashes(list(range(CHUNK)))
    with pytest.raises(ConfigError, match="8 bytes, expected at least 16: start .* blake3"):
        check_keys([ObjectKey(short[0], "m", 1)])
    with pytest.raises(ConfigError, match="more than 255 workers"):
        check_keys([ObjectKey(b"x" * 32, "m", ObjectKey.ComputeKVRank(300, 299, 300, 299))])
    check_keys(Side().keys())
    with Server(tmp_path) as server:
        key = ObjectKey(short[0], "m", 1)
        task = server.adapter.submit_lookup_and_lock_task([key], {})
        while (found := server.adapter.query_lookup_and_lock_result(task)) is None:
            pass
        assert not found.test(0)
        assert server.status["failed_tasks"] == 1
