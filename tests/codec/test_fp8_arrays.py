"""Arrays and tensors around the FP8 kernels: shapes, strides, memory, counts and errors.

What FP4 and FP8 have in common is one code; here is what the two formats of FP8 add to it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore import LayerGroup
from kvstore.codec import codec_for, native, quantized, torch_decode
from kvstore.layout import FORMATS, SCALE_RULES
from tests import fp8, numpy_fp4
from tests import numpy_fp8 as reference
from tests.strided import REDZONE, place, rest_of, strided

UNITS = {"mxfp8": 32, "fp8": 1}
NAN_SCALE = {"mxfp8": [0xFF], "fp8": [0, 0, 0xC0, 0x7F]}
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
quick = settings(deadline=None, derandomize=True, max_examples=60)
every_format = pytest.mark.parametrize("entry_format", [*native.FP8_FORMATS])


def random_values(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def plane_shapes(shape: tuple[int, ...], entry_format: str) -> list[tuple[int, ...]]:
    scales = shape[-1] // 32 if entry_format == "mxfp8" else 4
    return [shape, (*shape[:-1], scales)]


# Kinds of input and output.


@every_format
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_and_arrays_give_the_same_bytes(entry_format: str, dtype: str) -> None:
    tensor = torch.from_numpy(random_values((3, 2, 64))).to(getattr(torch, dtype))
    array = tensor.float().numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    from_tensor = fp8.pack(tensor, entry_format)
    from_array = fp8.pack(array, entry_format)
    for left, right in zip(from_tensor, from_array, strict=True):
        assert isinstance(left, torch.Tensor)
        assert isinstance(right, np.ndarray)
        assert np.array_equal(left.numpy(), right)
    decoded = fp8.unpack(*from_tensor, entry_format, dtype=dtype)
    decoded_array = fp8.unpack(*from_array, entry_format, dtype=dtype)
    assert decoded.dtype is getattr(torch, dtype)
    assert np.array_equal(decoded.float().numpy(), decoded_array.astype(np.float32))


@every_format
def test_the_default_rule_is_the_first_of_its_format(entry_format: str) -> None:
    values = random_values((8, 64))
    default = fp8.pack(values, entry_format)
    named = fp8.pack(values, entry_format, scale_rule=SCALE_RULES[entry_format][0])
    assert all(map(np.array_equal, default, named))


def test_importing_fp8_loads_neither_torch_nor_ml_dtypes() -> None:
    script = (
        "import sys, numpy as np\n"
        "from kvstore.codec import quantized\n"
        "kernel = quantized.Kernel('fp8', 'amax')\n"
        "planes = quantized.pack(np.ones((2, 32), np.float32), kernel)\n"
        "quantized.unpack(*planes, kernel, dtype='float32')\n"
        "assert not {'torch', 'ml_dtypes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@every_format
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_error_is_half_a_step_of_three_bits(entry_format: str, dtype: str) -> None:
    group = LayerGroup(name="k", layers=(0,), values=192, entry_format=entry_format)
    codec = codec_for(group)
    values = random_values((50, 192))
    decoded = codec.decode(codec.encode(values), dtype).astype(np.float32)
    # Steps are an eighth of the power of two below, and of 2**-6 scales at the least.
    scale = np.abs(values).max(axis=-1, keepdims=True) / (224 if entry_format == "mxfp8" else 448)
    assert (np.abs(decoded - values) <= np.abs(values) / 15.9 + scale * 2.0**-10).all()
    assert 0.02 < fp8.relative_error(values, entry_format) < 0.03


@every_format
def test_relative_error_is_what_packing_loses(entry_format: str) -> None:
    values = random_values((256, 128))
    decoded = fp8.unpack(*fp8.pack(values, entry_format), entry_format, dtype="float32")
    expected = np.linalg.norm(decoded - values) / np.linalg.norm(values)
    assert fp8.relative_error(values, entry_format) == pytest.approx(expected, rel=1e-4)
    assert fp8.relative_error(torch.ones(2, 32, dtype=torch.bfloat16), entry_format) < 1e-7
    assert fp8.relative_error(np.zeros((2, 32), np.float32), entry_format) == 0


# Memory: any strides, any alignment, nothing written beside the output.


@given(data=st.data(), entry_format=st.sampled_from([*UNITS]))
@quick
def test_any_shape_and_stride_gives_the_bytes_of_the_reference_and_no_other(
    data: st.DataObject, entry_format: str
) -> None:
    leading = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    units = data.draw(st.integers(1, 5 if entry_format == "mxfp8" else 70))
    shape = (*leading, UNITS[entry_format] * units)
    dtype = data.draw(st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]))
    itemsize = np.dtype(dtype).itemsize
    plain = random_values(shape, data.draw(st.integers(0, 9))).astype(dtype)
    _, values = place(shape, dtype, data.draw(strided(shape, itemsize)))
    values[...] = plain
    buffers, out = [], []
    for plane_shape in plane_shapes(shape, entry_format):
        buffer, view = place(plane_shape, np.uint8, data.draw(strided(plane_shape, 1)))
        buffers.append(buffer)
        out.append(view)

    result = fp8.pack(values, entry_format, out=(out[0], out[1]))

    expected = reference.pack(plain.astype(np.float32), entry_format)
    assert result[0] is out[0]
    assert np.array_equal(out[0], expected.codes)
    assert np.array_equal(out[1], expected.scales)
    for buffer, view in zip(buffers, out, strict=True):
        assert (rest_of(buffer, view) == REDZONE).all()

    target_buffer, target = place(shape, dtype, data.draw(strided(shape, itemsize)))
    assert fp8.unpack(out[0], out[1], entry_format, dtype=dtype, out=target) is target
    exact = reference.unpack(expected.codes, expected.scales, entry_format)
    bits = numpy_fp4.narrow(exact, np.dtype(dtype).name)
    assert np.ascontiguousarray(target).tobytes() == bits.tobytes()
    assert (rest_of(target_buffer, target) == REDZONE).all()


@given(
    entry_format=st.sampled_from([*UNITS]),
    row=st.lists(st.floats(width=32), min_size=32, max_size=32),
    kind=st.sampled_from(["array", "tensor"]),
    target=st.sampled_from(["float32", "float16", "bfloat16"]),
)
@quick
def test_any_floats_pack_and_unpack_as_the_reference(
    entry_format: str, row: list[float], kind: str, target: str
) -> None:
    codec = codec_for(LayerGroup(name="v", layers=(0,), values=32, entry_format=entry_format))
    values = np.array([row], np.float32)
    expected = reference.pack(values, entry_format)
    planes = np.concatenate([expected.codes, expected.scales], axis=-1)
    exact = reference.unpack(expected.codes, expected.scales, entry_format)
    bits = numpy_fp4.narrow(exact, target).tobytes()
    if kind == "array":
        entries = codec.encode(values)
        assert entries.tobytes() == planes.tobytes()
        assert codec.decode(entries, target).tobytes() == bits
    else:
        tensor = codec.encode(torch.from_numpy(values))
        assert tensor.numpy().tobytes() == planes.tobytes()
        decoded = codec.decode(tensor, target)
        assert decoded.view(torch.uint8).numpy().tobytes() == bits


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::2],
        lambda x: x.transpose(1, 0, 2),
        lambda x: x[:, :, 32:96],
        lambda x: np.broadcast_to(x[0, 0], (4, 128)),
        lambda x: x[:, :, ::2],  # the last axis is not contiguous: a copy
        lambda x: x[0, 0],
    ],
)
@every_format
def test_views_are_packed_as_their_copies(
    entry_format: str, view: Callable[[NDArray[np.float32]], NDArray[np.float32]]
) -> None:
    values = view(random_values((4, 6, 128)))
    expected = fp8.pack(np.ascontiguousarray(values), entry_format)
    result = fp8.pack(values, entry_format)
    assert all(map(np.array_equal, result, expected))
    codes, scales = (np.repeat(plane, 2, axis=-1)[..., ::2] for plane in result)
    decoded = fp8.unpack(codes, scales, entry_format, dtype="float32")
    assert np.array_equal(decoded, fp8.unpack(*expected, entry_format, dtype="float32"))


@pytest.mark.parametrize("values", [1, 2, 3, 31, 33, 192, 576])
def test_a_row_of_fp8_may_have_any_length(values: int) -> None:
    rows = random_values((5, values))
    codes, scales = fp8.pack(rows, "fp8")
    assert (codes.shape, scales.shape) == ((5, values), (5, 4))
    assert FORMATS["fp8"].planes(values) == (values, 4)
    for row in range(5):
        alone = fp8.pack(rows[row], "fp8")
        assert np.array_equal(alone[0], codes[row])
        assert np.array_equal(alone[1], scales[row])


# What a NaN, an infinity and the sign of zero become.


@every_format
@pytest.mark.parametrize("payload", [0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFF800001])
def test_a_nan_makes_its_block_nan_and_no_other(entry_format: str, payload: int) -> None:
    for place_in_block in (0, 1, 31):
        values = random_values((3, 32))
        clean = fp8.pack(values, entry_format)
        values[1].view(np.uint32)[place_in_block] = payload
        values[1, place_in_block - 1] = np.inf
        stats = fp8.PackStats()
        codes, scales = fp8.pack(values, entry_format, stats=stats)
        assert stats == fp8.PackStats(nan_blocks=1, inf_values=1)
        assert scales[1].tolist() == NAN_SCALE[entry_format]
        assert not codes[1].any()
        assert np.array_equal(codes[::2], clean[0][::2])
        assert np.array_equal(scales[::2], clean[1][::2])
        decoded = fp8.unpack(codes, scales, entry_format, dtype="float32")
        assert (decoded[1].view(np.uint32) == 0x7FC00000).all()
        assert np.isfinite(decoded[::2]).all()


def test_infinities_saturate_with_the_scale_of_their_block() -> None:
    values = np.ones((2, 64), np.float32)
    values[0, :3] = [np.inf, -np.inf, -0.0]
    stats = fp8.PackStats(inf_values=10)
    codes, scales = fp8.pack(values, "mxfp8", stats=stats)
    assert stats == fp8.PackStats(nan_blocks=0, inf_values=12)
    assert codes[0, :4].tolist() == [0x7E, 0xFE, 0x80, 0]
    assert scales.tolist() == [[254, 119], [119, 119]]
    decoded = fp8.unpack(codes, scales, "mxfp8", dtype="float32")
    assert decoded[0, :4].tolist() == [np.inf, -np.inf, 0, 0]


def test_an_infinity_in_a_row_of_fp8_leaves_the_finite_values_as_they_are() -> None:
    values = random_values((1, 64))
    alone = fp8.pack(values, "fp8")
    values[0, 5:7] = 0
    expected = fp8.pack(values, "fp8")
    values[0, 5:7] = [np.inf, -np.inf]
    stats = fp8.PackStats()
    codes, scales = fp8.pack(values, "fp8", stats=stats)
    assert stats == fp8.PackStats(nan_blocks=0, inf_values=2)
    assert codes[0, 5:7].tolist() == [0x7E, 0xFE]
    codes[0, 5:7] = 0
    assert np.array_equal(codes, expected[0])
    assert np.array_equal(scales, expected[1])
    assert np.array_equal(scales, alone[1])  # the largest is elsewhere


def test_a_row_of_infinities_and_zeros_comes_back_as_the_largest_float() -> None:
    values = np.array([np.inf, -np.inf, 0.0, -0.0], np.float32)
    largest = np.finfo(np.float32).max
    decoded = fp8.unpack(*fp8.pack(values, "fp8"), "fp8", dtype="float32")
    assert decoded.tolist() == [largest, -largest, 0, 0]
    assert np.signbit(decoded).tolist() == [False, True, False, True]


@every_format
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_zero_block_has_scale_0_and_keeps_its_signs(entry_format: str, zero: float) -> None:
    codes, scales = fp8.pack(np.full(32, zero, np.float32), entry_format)
    assert set(codes.tolist()) == {0x80 if np.signbit(zero) else 0}
    assert not scales.any()
    decoded = fp8.unpack(codes, scales, entry_format, dtype="float32")
    assert (decoded == 0).all()
    assert (np.signbit(decoded) == np.signbit(zero)).all()


@every_format
def test_what_rounds_to_zero_keeps_its_sign(entry_format: str) -> None:
    values = np.array([448.0, 2.0**-11, -(2.0**-11)] + [0.0] * 29, np.float32)
    assert fp8.pack(values, entry_format)[0][:3].tolist() == [0x7E, 0, 0x80]


@every_format
def test_subnormals_count_even_where_the_thread_flushes_them(entry_format: str) -> None:
    values = np.array([2.0**-127, 2.0**-128, -3 * 2.0**-129] + [0.0] * 29, np.float32)
    expected = fp8.pack(values, entry_format)
    wide = fp8.unpack(*expected, entry_format, dtype="float32").tobytes()
    torch.set_flush_denormal(True)
    try:
        codes, scales = fp8.pack(values, entry_format)
        decoded = fp8.unpack(codes, scales, entry_format, dtype="float32").tobytes()
    finally:
        torch.set_flush_denormal(False)
    assert codes.tobytes() == expected[0].tobytes()
    assert scales.tobytes() == expected[1].tobytes()
    assert codes[0] == {"mxfp8": 0x38, "fp8": 0x7E}[entry_format]
    assert decoded == wide


def test_repacking_what_was_unpacked_gives_the_same_values() -> None:
    values = random_values((64, 96))
    for entry_format in UNITS:
        decoded = fp8.unpack(*fp8.pack(values, entry_format), entry_format, dtype="float32")
        again = fp8.unpack(*fp8.pack(decoded, entry_format), entry_format, dtype="float32")
        if entry_format == "mxfp8":
            assert np.array_equal(again, decoded)
        else:  # the product 448 * scale is rounded, so the scale may move by its last bit
            assert np.allclose(again, decoded, rtol=2.0**-22, atol=0)


# Errors: they name what was found and what was expected, and write nothing.

ONES = np.ones((2, 32), np.float32)
CODES, SCALES = fp8.pack(ONES, "fp8")


def empty(*shape: int, dtype: type[np.generic] = np.uint8) -> NDArray[np.generic]:
    return np.full(shape, REDZONE, np.uint8).astype(dtype)


SHARED = empty(2, 40)
PACK_ERRORS = {
    "list": ({"values": [1.0] * 16}, "values must be a NumPy array or a torch tensor, found list"),
    "float64": ({"values": np.ones((2, 32))}, "float32 or float16 or bfloat16, found float64"),
    "block": (
        {"values": ONES[:, :24], "entry_format": "mxfp8"},
        "multiple of the mxfp8 block of 32, found 24 values",
    ),
    "no values": (
        {"values": ONES[:, :0]},
        "at least one value, as fp8 stores a scale for each row, found 0 values",
    ),
    "format": ({"entry_format": "e5m2"}, "unknown FP8 format 'e5m2', expected one of mxfp8, fp8"),
    "other format": ({"entry_format": "mxfp4"}, "unknown FP8 format 'mxfp4'"),
    "rule": ({"scale_rule": "rceil"}, "fp8 has no scale rule 'rceil', expected one of amax"),
    "mx rule": (
        {"entry_format": "mxfp8", "scale_rule": "floor"},
        "mxfp8 has no scale rule 'floor', expected one of rceil",
    ),
    "out pair": ({"out": (empty(2, 32),)}, "the pair \\(codes, scales\\), found 1 items"),
    "out shape": ({"out": (empty(2, 31), empty(2, 4))}, "out codes must have shape \\[2, 32\\], f"),
    "out scales": ({"out": (empty(2, 32), empty(2, 1))}, "out scales must have shape \\[2, 4\\]"),
    "out floats": (
        {"out": (empty(2, 32), empty(2, 1, dtype=np.float32))},
        "out scales must have dtype uint8, found float32",
    ),
    "out kind": (
        {"out": (torch.zeros(2, 32, dtype=torch.uint8), empty(2, 4))},
        "out codes must be a NumPy array like the input, found a torch tensor",
    ),
    "out each other": (
        {"out": (SHARED[:, :32], SHARED[:, 31:35])},
        "out codes and out scales overlap",
    ),
    "out and values": (
        {"out": (ONES.view(np.uint8)[:, :32], empty(2, 4))},
        "out codes and values overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), PACK_ERRORS.values(), ids=PACK_ERRORS.keys())
def test_pack_errors_name_found_and_expected(change: dict[str, object], message: str) -> None:
    arguments: dict[str, Any] = {"values": ONES, "entry_format": "fp8", **change}
    before = ONES.tobytes()
    with pytest.raises(ValueError, match=message):
        fp8.pack(**arguments)
    planes = change.get("out", ())
    assert isinstance(planes, tuple)
    for plane in planes:
        if isinstance(plane, np.ndarray) and plane.base is not ONES and plane.dtype == np.uint8:
            assert (plane == REDZONE).all()
    assert ONES.tobytes() == before


UNPACK_ERRORS = {
    "code dtype": ({"codes": CODES.view(np.int8)}, "codes must have dtype uint8, found int8"),
    "float8": (
        {"codes": CODES.view(ml_dtypes.float8_e4m3fn)},
        "codes must have dtype uint8, found float8_e4m3fn",
    ),
    "scale dtype": ({"scales": SCALES.view("<f4")}, "scales must have dtype uint8, found float32"),
    "kinds": (
        {"scales": torch.from_numpy(SCALES)},
        "scales must be a NumPy array like the input, found a t",
    ),
    "scale shape": (
        {"scales": SCALES[:, :1]},
        "scales must have shape \\[2, 4\\] for fp8 codes of shape \\[2, 32\\], found \\[2, 1\\]",
    ),
    "scale axes": ({"scales": SCALES[0]}, "found \\[4\\]"),
    "no values": ({"codes": CODES[:, :0]}, "at least one value"),
    "block": (
        {"codes": CODES[:, :8], "entry_format": "mxfp8"},
        "multiple of the mxfp8 block of 32, found 8 values",
    ),
    "format": ({"entry_format": "int8"}, "unknown FP8 format 'int8'"),
    "dtype": ({"dtype": "float64"}, "unknown dtype 'float64', expected one of float32, float16"),
    "bytes": ({"dtype": "uint8"}, "dtype must be float32 or float16 or bfloat16, found uint8"),
    "out dtype": ({"out": np.empty((2, 32), np.float16)}, "out must have dtype float32, found f"),
    "out shape": ({"out": np.empty((2, 31), np.float32)}, "out must have shape \\[2, 32\\]"),
}


@pytest.mark.parametrize(("change", "message"), UNPACK_ERRORS.values(), ids=UNPACK_ERRORS.keys())
def test_unpack_errors_name_found_and_expected(change: dict[str, object], message: str) -> None:
    arguments: dict[str, Any] = {"codes": CODES, "scales": SCALES, "entry_format": "fp8"}
    with pytest.raises(ValueError, match=message):
        fp8.unpack(**(arguments | {"dtype": "float32"} | change))


@pytest.mark.parametrize("name", ["codes", "scales"])
def test_an_output_may_not_share_memory_with_a_plane(name: str) -> None:
    out = np.zeros((2, 32), np.float32)
    planes = {"codes": CODES, "scales": SCALES}
    planes[name] = out.view(np.uint8)[:, 90 : 90 + planes[name].shape[-1]]
    with pytest.raises(ValueError, match=f"out and {name} overlap"):
        fp8.unpack(**planes, entry_format="fp8", dtype="float32", out=out)


# Tensors of other devices; their code paths run on the host too.


@every_format
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_device_decoding_gives_the_bits_of_the_kernels(
    entry_format: str, dtype: str, device: str
) -> None:
    # Magnitudes from subnormal to infinite, and the planes as slices of entries, as in pages.
    sizes = 10.0 ** np.arange(-44, 40, 14)[:, None]
    values = torch.from_numpy((random_values((2, 6, 64)) * sizes).astype(np.float32))
    entries = torch.cat(fp8.pack(values, entry_format), dim=-1).to(device)
    planes = entries[..., :64], entries[..., 64:]
    expected = fp8.unpack(planes[0].cpu(), planes[1].cpu(), entry_format, dtype=dtype)
    kernel = quantized.Kernel(entry_format, SCALE_RULES[entry_format][0])
    found = quantized._unpack_remote(planes, kernel, dtype, None)
    assert found.device.type == device
    assert torch.equal(found.cpu().view(torch.uint8), expected.view(torch.uint8))
    out = torch.empty_like(found)
    assert quantized._unpack_remote(planes, kernel, dtype, out) is out
    assert torch.equal(out.cpu().view(torch.uint8), expected.view(torch.uint8))
    with pytest.raises(ValueError, match="out must have shape, dtype and device"):
        quantized._unpack_remote(planes, kernel, dtype, out[:1])
    with pytest.raises(ValueError, match="scales must have shape, dtype and device"):
        quantized._unpack_remote((planes[0], planes[1].int()), kernel, dtype, None)


@every_format
@pytest.mark.parametrize("shape", [(32,), (0, 32), (2, 0, 64), (1, 1, 96)])
def test_device_decoding_takes_any_shape(entry_format: str, shape: tuple[int, ...]) -> None:
    planes = fp8.pack(torch.ones(shape), entry_format)
    assert torch_decode.unpack_fp8(*planes, entry_format, "float16").shape == shape


@every_format
def test_device_decoding_of_odd_offsets(entry_format: str) -> None:
    values = torch.from_numpy(random_values((1, 64)))
    planes = fp8.pack(values, entry_format)
    expected = fp8.unpack(*planes, entry_format, dtype="bfloat16")
    for offset in range(5):
        room = torch.zeros(1, 100, dtype=torch.uint8)
        room[:, offset : offset + 64] = planes[0]
        room[:, offset + 64 : offset + 64 + planes[1].shape[-1]] = planes[1]
        rest = room[:, offset : offset + 64], room[:, offset + 64 :][:, : planes[1].shape[-1]]
        assert torch.equal(torch_decode.unpack_fp8(*rest, entry_format, "bfloat16"), expected)
