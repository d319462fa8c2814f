"""One contract, every entry format: values to entries and back, arrays and tensors alike."""

from __future__ import annotations

from typing import cast

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore import ConfigError, LayerGroup, fp4
from kvstore.codec import codec_for, native, torch_decode
from kvstore.codec.protocol import Codec
from kvstore.layout import FORMATS, SCALE_RULES, EntryFormat
from kvstore.layout import layout as model_layout
from tests import fp8

RAW = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "u8": "uint8"}
RULES = [(name, rule) for name, rules in SCALE_RULES.items() for rule in rules]
EVERY = [(name, "") for name in RAW] + RULES
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
every_codec = pytest.mark.parametrize(("entry_format", "rule"), EVERY)


def codec_of(entry_format: str, rule: str = "", values: int = 64) -> Codec:
    group = LayerGroup(
        name="g", layers=(0,), values=values, entry_format=entry_format, scale_rule=rule
    )
    return codec_for(group)


def tensor_for(entry_format: str, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.from_numpy(np.random.default_rng(0).standard_normal(shape).astype(np.float32))
    if entry_format == "u8":
        return (numbers * 40).to(torch.int32).to(torch.uint8)
    return numbers.to(getattr(torch, RAW.get(entry_format, "bfloat16")))


def as_array(tensor: torch.Tensor) -> NDArray[np.generic]:
    if tensor.dtype is torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def dtype_for(entry_format: str) -> str:
    return RAW.get(entry_format, "bfloat16")


@every_codec
@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 0)])
def test_arrays_and_tensors_have_the_same_entries(
    entry_format: str, rule: str, leading: tuple[int, ...]
) -> None:
    codec = codec_of(entry_format, rule)
    tensor = tensor_for(entry_format, (*leading, 64))
    array = as_array(tensor)
    entries = codec.encode(array)
    assert entries.dtype == np.uint8
    assert entries.shape == (*leading, codec.entry_bytes)
    assert codec.values == 64
    assert codec.entry_bytes == FORMATS[entry_format].entry_bytes(64)
    assert np.array_equal(codec.encode(tensor).numpy(), entries)
    decoded = codec.decode(entries, dtype_for(entry_format))
    assert decoded.shape == (*leading, 64)
    from_tensor = codec.decode(torch.from_numpy(entries), dtype_for(entry_format))
    assert as_array(from_tensor).tobytes() == decoded.tobytes()


@pytest.mark.parametrize("entry_format", RAW)
def test_raw_entries_are_the_numbers_bytes(entry_format: str) -> None:
    codec = codec_of(entry_format)
    patterns = np.random.default_rng(0).integers(0, 256, (5, codec.entry_bytes), np.uint8)
    # NaN payloads included.
    assert codec.encode(codec.decode(patterns, RAW[entry_format])).tobytes() == patterns.tobytes()
    tensor = torch.from_numpy(patterns)
    assert torch.equal(codec.encode(codec.decode(tensor, RAW[entry_format])), tensor)


@pytest.mark.parametrize("kind", ["array", "tensor"])
@every_codec
def test_encode_writes_to_out_in_place(entry_format: str, rule: str, kind: str) -> None:
    codec = codec_of(entry_format, rule)
    tensor = tensor_for(entry_format, (2, 3, 64))
    expected = codec.encode(as_array(tensor))
    room = np.full((2, 4, codec.entry_bytes), 0xA5, np.uint8)
    if kind == "array":
        out = room[:, 1:]
        assert codec.encode(as_array(tensor), out) is out
    else:
        target = torch.from_numpy(room)[:, 1:]
        assert codec.encode(tensor, target) is target
    assert np.array_equal(room[:, 1:], expected)
    assert (room[:, 0] == 0xA5).all()


@every_codec
def test_decode_reads_views_of_any_offset_and_stride(entry_format: str, rule: str) -> None:
    codec = codec_of(entry_format, rule)
    entries = codec.encode(as_array(tensor_for(entry_format, (4, 64))))
    expected = codec.decode(entries, dtype_for(entry_format)).tobytes()
    room = np.zeros((4, codec.entry_bytes + 7), np.uint8)
    for offset in range(7):
        view = room[:, offset : offset + codec.entry_bytes]
        view[...] = entries
        assert codec.decode(view, dtype_for(entry_format)).tobytes() == expected
        tensor = torch.from_numpy(room)[:, offset : offset + codec.entry_bytes]
        assert as_array(codec.decode(tensor, dtype_for(entry_format))).tobytes() == expected
        one = torch.from_numpy(room)[:1, offset : offset + codec.entry_bytes]
        assert as_array(codec.decode(one, dtype_for(entry_format)))[0].tobytes() == (
            codec.decode(entries[0], dtype_for(entry_format)).tobytes()
        )
    sparse = np.repeat(entries, 2, axis=-1)
    assert codec.decode(sparse[:, ::2], dtype_for(entry_format)).tobytes() == expected
    spread = torch.from_numpy(sparse)[:, ::2]
    assert as_array(codec.decode(spread, dtype_for(entry_format))).tobytes() == expected


@pytest.mark.parametrize("found", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("target", ["float32", "float16", "bfloat16"])
def test_raw_decoding_to_another_type_rounds_once(found: str, target: str) -> None:
    dtypes = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    codec = codec_of(found)
    if found == "f32":
        near = np.arange(65536, dtype=np.uint32)[:, None] << 16
        ties = (near + np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x1000, 0x3000])).view()
        bits = ties.astype(np.uint32).reshape(-1, 64)
        values = bits.view(np.float32)
    else:
        halves = np.arange(65536, dtype=np.uint32).astype(np.uint16).reshape(-1, 64)
        values = halves.view(dtypes[RAW[found]])
    with np.errstate(all="ignore"):
        wide = values.astype(np.float32)
        expected = wide.astype(dtypes[target]).astype(np.float32)
    entries = codec.encode(values)
    array = codec.decode(entries, target)
    tensor = codec.decode(torch.from_numpy(entries), target)
    assert array.dtype == dtypes[target]
    with np.errstate(all="ignore"):
        assert np.array_equal(array.astype(np.float32), expected, equal_nan=True)
    assert np.array_equal(tensor.float().numpy(), expected, equal_nan=True)
    assert np.array_equal(np.signbit(array.astype(np.float32))[~np.isnan(wide)],
                          np.signbit(expected)[~np.isnan(wide)])  # fmt: skip


@pytest.mark.parametrize(
    ("entry_format", "rule"), [rule for rule in RULES if rule[0] in native.FP4_FORMATS]
)
def test_fp4_entries_are_nibbles_then_scales(entry_format: str, rule: str) -> None:
    codec = codec_of(entry_format, rule)
    values = as_array(tensor_for("f32", (3, 64)))
    nibbles, scales = fp4.pack(values, entry_format, scale_rule=rule)
    entries = codec.encode(values)
    assert np.array_equal(entries, np.concatenate([nibbles, scales], axis=-1))
    expected = fp4.unpack(nibbles, scales, entry_format, dtype="float16")
    assert np.array_equal(codec.decode(entries, "float16"), expected)


@pytest.mark.parametrize("entry_format", [*native.FP8_FORMATS])
def test_fp8_entries_are_codes_then_scales(entry_format: str) -> None:
    codec = codec_of(entry_format)
    values = as_array(tensor_for("f32", (3, 64)))
    codes, scales = fp8.pack(values, entry_format)
    entries = codec.encode(values)
    assert np.array_equal(entries, np.concatenate([codes, scales], axis=-1))
    expected = fp8.unpack(codes, scales, entry_format, dtype="float16")
    assert np.array_equal(codec.decode(entries, "float16"), expected)


def test_entries_of_the_v41_preset_have_a_codec() -> None:
    layout = model_layout("deepseek-v4.1-flash")
    sizes = {group.name: codec_for(group).entry_bytes for group in layout.global_groups}
    assert sizes == {"main_r2": 288, "index_r2": 68, "main_r1": 288, "index_r1": 68}
    windows = {codec_for(group).entry_bytes for group in layout.window_groups}
    assert windows == {528}


@pytest.mark.parametrize("entry_format", FORMATS)
def test_every_format_has_a_codec(entry_format: str) -> None:
    assert codec_of(entry_format).entry_bytes == FORMATS[entry_format].entry_bytes(64)


def test_a_format_without_a_codec_is_a_config_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    later = EntryFormat(name="later", value_bits=8)
    monkeypatch.setitem(cast("dict[str, EntryFormat]", FORMATS), "later", later)
    with pytest.raises(ConfigError, match="group 'g': entry format 'later' has no codec, expected"):
        codec_of("later")


@every_codec
def test_codec_errors_name_found_and_expected(entry_format: str, rule: str) -> None:
    codec = codec_of(entry_format, rule)
    dtype = dtype_for(entry_format)
    values = as_array(tensor_for(entry_format, (2, 64)))
    entries = codec.encode(values)
    with pytest.raises(ValueError, match=r"values must have 64 numbers .* found shape \[2, 32\]"):
        codec.encode(values[:, :32])
    with pytest.raises(ValueError, match=r"values must have .* found shape \[\]"):
        codec.encode(values[0, 0, ...].reshape(()))
    with pytest.raises(ValueError, match="values must be a NumPy array or a torch tensor"):
        codec.encode(values.tolist())
    with pytest.raises(ValueError, match=r"values must have dtype .* found complex64"):
        codec.encode(np.zeros((2, 64), np.complex64))
    with pytest.raises(ValueError, match=rf"entries must have {codec.entry_bytes} numbers"):
        codec.decode(entries[:, :-1], dtype)
    with pytest.raises(ValueError, match="must have dtype uint8, found int8"):
        codec.decode(entries.view(np.int8), dtype)
    with pytest.raises(ValueError, match="unknown dtype 'float64'"):
        codec.decode(entries, "float64")
    with pytest.raises(ValueError, match="found"):
        codec.decode(entries, "float32" if entry_format == "u8" else "uint8")
    with pytest.raises(ValueError, match=rf"out must have {codec.entry_bytes} numbers"):
        codec.encode(values, np.empty((2, 3), np.uint8))
    with pytest.raises(ValueError, match=r"out .*must .*have shape"):
        codec.encode(values, np.empty((3, codec.entry_bytes), np.uint8))
    with pytest.raises(ValueError, match="must be"):
        codec.encode(values, torch.empty(2, codec.entry_bytes, dtype=torch.uint8))


def test_a_raw_codec_refuses_another_dtype_instead_of_converting() -> None:
    with pytest.raises(ValueError, match="values must have dtype bfloat16, found float32"):
        codec_of("bf16").encode(np.ones((2, 64), np.float32))
    with pytest.raises(ValueError, match="values must have dtype bfloat16, found float16"):
        codec_of("bf16").encode(torch.ones(2, 64, dtype=torch.float16, device="meta"))


# Decoding by torch operations.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("entry_format", "global_scale"), [("mxfp4", 1.0), ("nvfp4", 1.0), ("nvfp4", 0.37)]
)
def test_the_table_decodes_bit_for_bit_as_the_kernels(
    entry_format: str, global_scale: float, dtype: str, device: str
) -> None:
    block = FORMATS[entry_format].scale_block
    rng = np.random.default_rng(0)
    nibbles = rng.permuted(np.tile(np.arange(256, dtype=np.uint8), (256, 1)), axis=1)
    scales = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 512 // block))
    planes = torch.from_numpy(nibbles), torch.from_numpy(scales)
    expected = fp4.unpack(*planes, entry_format, dtype=dtype, global_scale=global_scale)
    found = torch_decode.unpack(
        planes[0].to(device), planes[1].to(device), entry_format, dtype, global_scale
    )
    bits = torch.int32 if dtype == "float32" else torch.int16
    assert torch.equal(found.cpu().view(bits), expected.view(bits))
    for shape in ((0, 512), (2, 2, 512), (512,)):
        some = planes[0].expand(2, *planes[0].shape)[:, :2] if len(shape) == 3 else planes[0]
        rows = {1: planes[0][0], 2: planes[0][:0], 3: some}[len(shape)]
        row_scales = {
            1: planes[1][0],
            2: planes[1][:0],
            3: planes[1].expand(2, *planes[1].shape)[:, :2],
        }[len(shape)]
        decoded = torch_decode.unpack(rows, row_scales, entry_format, dtype, global_scale)
        assert decoded.shape == shape


@pytest.mark.parametrize("device", DEVICES)
@every_codec
def test_a_codec_works_on_the_tensors_device(entry_format: str, rule: str, device: str) -> None:
    codec = codec_of(entry_format, rule)
    values = tensor_for(entry_format, (2, 3, 64))
    expected = codec.encode(values)
    entries = codec.encode(values.to(device))
    out = torch.zeros_like(entries)
    codec.encode(values.to(device), out)
    assert entries.device.type == device
    assert torch.equal(entries.cpu(), expected)
    assert torch.equal(out.cpu(), expected)
    decoded = codec.decode(entries, dtype_for(entry_format))
    assert decoded.device.type == device
    assert torch.equal(decoded.cpu(), codec.decode(expected, dtype_for(entry_format)))
