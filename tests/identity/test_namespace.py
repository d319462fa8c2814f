"""The digest of a model's weights: content counts, names under which it is served do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvstore
from kvstore.identity.namespace import SAMPLE_BYTES, SAMPLES

SHARDS = {
    "model-00001-of-00002.safetensors": b"header" + bytes(range(256)) * 40,
    "model-00002-of-00002.safetensors": b"header" + bytes(1000),
    "config.json": b'{"model_type": "llama"}',
}


def folder_of(root: Path, files: dict[str, bytes]) -> Path:
    root.mkdir()
    for name, content in files.items():
        (root / name).write_bytes(content)
    return root


def test_the_same_weights_in_another_folder_have_the_same_digest(tmp_path: Path) -> None:
    one = folder_of(tmp_path / "one", SHARDS)
    two = folder_of(tmp_path / "two", dict(reversed(SHARDS.items())))
    assert kvstore.weights_digest(one) == kvstore.weights_digest(str(two))
    (one / "README.md").write_text("not weights", encoding="utf-8")
    (one / "nested").mkdir()
    assert kvstore.weights_digest(one) == kvstore.weights_digest(two)


def flip(name: str, place: int) -> Callable[[dict[str, bytes]], None]:
    def change(files: dict[str, bytes]) -> None:
        content = bytearray(files[name])
        content[place] ^= 1
        files[name] = bytes(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        flip("model-00001-of-00002.safetensors", 0),
        flip("model-00001-of-00002.safetensors", 5000),
        flip("model-00002-of-00002.safetensors", -1),
        flip("config.json", 3),
        lambda files: files.pop("config.json"),
        lambda files: files.pop("model-00002-of-00002.safetensors"),
        lambda files: files.update({"model-3.safetensors": b""}),
        lambda files: files.update({"adapter_config.json": b'{"lora_alpha": 32}'}),
        lambda files: files.update(
            {"renamed.safetensors": files.pop("model-00002-of-00002.safetensors")}
        ),
        lambda files: files.update({"config.json": files["config.json"] + b" "}),
    ],
)
def test_any_other_weights_have_another_digest(
    tmp_path: Path, change: Callable[[dict[str, bytes]], None]
) -> None:
    files = dict(SHARDS)
    change(files)
    before = kvstore.weights_digest(folder_of(tmp_path / "before", SHARDS))
    assert kvstore.weights_digest(folder_of(tmp_path / "after", files)) != before


def test_a_large_shard_is_sampled_at_its_start_its_end_and_between(tmp_path: Path) -> None:
    size = 3 * SAMPLES * SAMPLE_BYTES + 17
    path = tmp_path / "model.gguf"

    def digest_with(place: int | None) -> str:
        with path.open("wb") as file:
            file.truncate(size)
            if place is not None:
                file.seek(place)
                file.write(b"x")
        return kvstore.weights_digest(path)

    sampled = [0, SAMPLE_BYTES - 1, size // SAMPLES * 40 + 5, size - 1]
    digests = {digest_with(place) for place in [None, *sampled]}
    assert len(digests) == 1 + len(sampled)
    assert digest_with(SAMPLE_BYTES + 1) == digest_with(None), "between samples nothing is read"


def test_one_file_counts_by_content_and_not_by_name(tmp_path: Path) -> None:
    one, two = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"weights")
    two.write_bytes(b"weights")
    assert kvstore.weights_digest(one) == kvstore.weights_digest(two)


def test_where_there_are_no_weights_that_is_said(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "missing"):
        with pytest.raises(kvstore.ConfigError, match=r"no weights at .*expected a folder of"):
            kvstore.weights_digest(place)
