"""Records as columns are the records that LMDB has, one by one."""

from __future__ import annotations

import math
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.identity.block import BlockKey
from kvstore.tier.ssd import btree
from kvstore.tier.ssd.records import RECORD_BYTES, Record, Records

BYTES_16 = st.binary(min_size=16, max_size=16)


def test_columns_say_what_records_say() -> None:
    rng = np.random.default_rng(0)
    keys = sorted({rng.bytes(16) for _ in range(200)})
    values = [rng.bytes(RECORD_BYTES) for _ in keys]
    values[7] = Record(parent=BlockKey(bytes(16)), number=0, namespace_id=1, sequence=2).pack()
    values[8] = values[8][:40] + np.float64(math.nan).tobytes() + values[8][48:]
    records = Records(b"".join(key + value for key, value in zip(keys, values, strict=True)))
    found = list(records)
    assert len(records) == len(keys)
    expected = [(key, Record.unpack(value)) for key, value in zip(keys, values, strict=True)]
    assert dict(records).keys() == set(keys)
    assert repr(found) == repr(expected)  # some errors are NaN, which is equal to nothing
    assert [key.tobytes() for key in records.key] == keys
    assert records.number.tolist() == [record.number for _, record in found]
    assert records.namespace_id.tolist() == [record.namespace_id for _, record in found]
    assert records.sequence.tolist() == [record.sequence for _, record in found]
    assert max(records.sequence) <= 2**63
    assert records.expires.tolist() == [record.expires for _, record in found]
    assert records.is_pinned.tolist() == [record.is_pinned for _, record in found]


@given(
    keys=st.sets(st.one_of(BYTES_16, st.integers(0, 40).map(lambda n: n.to_bytes(16, "big")))),
    others=st.lists(BYTES_16, max_size=5),
    data=st.data(),
)
def test_parents_are_found_by_their_whole_keys(
    keys: set[bytes], others: list[bytes], data: st.DataObject
) -> None:
    """Also where many keys begin alike. Oracle: a dict."""
    ordered = sorted(keys)
    some = st.sampled_from([*ordered, *others, bytes(16)])
    parents = [data.draw(some) for _ in ordered]
    rows = [
        key + Record(parent=BlockKey(parent), number=1, namespace_id=1, sequence=1).pack()
        for key, parent in zip(ordered, parents, strict=True)
    ]
    places = {key: place for place, key in enumerate(ordered)}
    found = Records(b"".join(rows)).parents().tolist()
    assert found == [places.get(parent, -1) for parent in parents]


@pytest.fixture
def env(tmp_path: Path) -> lmdb.Environment:
    return lmdb.open(str(tmp_path), max_dbs=1, lib_version=0, map_size=64 << 20, sync=False)


def pairs_of(env: lmdb.Environment) -> tuple[bytes, bytes]:
    """Return what is read by leaves, and what LMDB says pair by pair."""
    with env.begin(buffers=True) as txn:
        by_leaf = b"".join(btree.rows(txn.cursor(), 16, RECORD_BYTES))
    with env.begin() as txn:
        one_by_one = b"".join(
            bytes(key) + bytes(value)
            for key, value in txn.cursor()
            if (len(key), len(value)) == (16, RECORD_BYTES)
        )
    return by_leaf, one_by_one


def test_rows_are_the_pairs_of_a_snapshot(env: lmdb.Environment) -> None:
    """What is no record of a block is left out, wherever it lies in a leaf."""
    rng = np.random.default_rng(1)
    assert pairs_of(env) == (b"", b"")
    with env.begin(write=True) as txn:
        for number in range(5000):
            size = int(rng.choice([RECORD_BYTES, RECORD_BYTES, RECORD_BYTES, 0, 63, 65, 9000]))
            key_bytes = int(rng.choice([16, 16, 16, 15, 17, 400]))
            txn.put(rng.bytes(key_bytes), rng.bytes(size))
            if not number % 7:
                txn.put(rng.bytes(16), b"")
    by_leaf, one_by_one = pairs_of(env)
    assert by_leaf == one_by_one != b""
    with env.begin(buffers=True) as txn:
        rows = btree.rows(txn.cursor(), 16, RECORD_BYTES)
        first = next(rows)
        with env.begin(write=True) as change:
            change.drop(env.open_db(None, txn=change), delete=False)
        assert first + b"".join(rows) == one_by_one
    assert pairs_of(env) == (b"", b"")


def test_a_leaf_that_makes_no_sense_is_left_to_lmdb(env: lmdb.Environment, tmp_path: Path) -> None:
    """Readers do not look at all trees first: keys that do not ascend must not lead them in circles."""
    with env.begin(write=True) as txn:
        for number in range(500):
            txn.put(number.to_bytes(16, "big"), bytes(RECORD_BYTES))
    env.sync(True)
    env.close()
    data = tmp_path / "data.mdb"
    whole = bytearray(data.read_bytes())
    leaves = [at for at in range(8192, len(whole), 4096) if whole[at + 10] == 2]
    for at in leaves[1::2]:  # the order of two nodes
        whole[at + 18 : at + 22] = whole[at + 20 : at + 22] + whole[at + 18 : at + 20]
    data.write_bytes(whole)
    with lmdb.open(str(tmp_path), lib_version=0, readonly=True) as spoiled:
        by_leaf, one_by_one = pairs_of(spoiled)
    assert len(one_by_one) == 500 * (16 + RECORD_BYTES)
    assert sorted(by_leaf[at : at + 80] for at in range(0, len(by_leaf), 80)) == sorted(
        one_by_one[at : at + 80] for at in range(0, len(one_by_one), 80)
    )
