"""Arrays and tensors around the kernels: shapes, strides, memory, counts and errors."""

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

from kvstore import fp4
from kvstore.codec import native, quantized
from kvstore.layout import FORMATS, SCALE_RULES
from tests import numpy_fp4
from tests.strided import REDZONE, place, rest_of, strided

pytestmark = pytest.mark.usefixtures("level")

RULES = [(name, rule) for name in native.FP4_FORMATS for rule in SCALE_RULES[name]]
quick = settings(deadline=None, derandomize=True, max_examples=60)
every_format = pytest.mark.parametrize("entry_format", [*native.FP4_FORMATS])


def random_values(shape: tuple[int, ...], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def plane_shapes(shape: tuple[int, ...], entry_format: str) -> list[tuple[int, ...]]:
    return [(*shape[:-1], plane) for plane in FORMATS[entry_format].planes(shape[-1])]


# Kinds of input and output.


@every_format
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_and_arrays_give_the_same_bytes(entry_format: str, dtype: str) -> None:
    tensor = torch.from_numpy(random_values((3, 2, 64))).to(getattr(torch, dtype))
    array = tensor.float().numpy().astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    from_tensor = fp4.pack(tensor, entry_format)
    from_array = fp4.pack(array, entry_format)
    for left, right in zip(from_tensor, from_array, strict=True):
        assert isinstance(left, torch.Tensor)
        assert isinstance(right, np.ndarray)
        assert left.dtype is torch.uint8
        assert right.dtype == np.uint8
        assert np.array_equal(left.numpy(), right)
    decoded = fp4.unpack(*from_tensor, entry_format, dtype=dtype)
    decoded_array = fp4.unpack(*from_array, entry_format, dtype=dtype)
    assert decoded.dtype is getattr(torch, dtype)
    assert np.array_equal(decoded.float().numpy(), decoded_array.astype(np.float32))


@every_format
def test_the_default_rule_is_the_first_of_its_format(entry_format: str) -> None:
    values = random_values((8, 64))
    default = fp4.pack(values, entry_format)
    named = fp4.pack(values, entry_format, scale_rule=SCALE_RULES[entry_format][0])
    assert all(map(np.array_equal, default, named))


def test_bfloat16_is_the_default_dtype_of_unpack() -> None:
    array = fp4.unpack(*fp4.pack(random_values((2, 16)), "nvfp4"), "nvfp4")
    tensor = fp4.unpack(*fp4.pack(torch.ones(2, 16), "nvfp4"), "nvfp4")
    assert (array.dtype, tensor.dtype) == (np.dtype(ml_dtypes.bfloat16), torch.bfloat16)


@pytest.mark.parametrize(
    "dtype", ["float16", "torch.float16", torch.float16, np.float16, np.dtype("float16")]
)
def test_unpack_takes_a_dtype_by_any_of_its_names(dtype: str) -> None:
    packed = fp4.pack(random_values((2, 16)), "nvfp4")
    assert fp4.unpack(*packed, "nvfp4", dtype=dtype).dtype == np.float16


def test_bfloat16_bits_can_be_had_as_integers() -> None:
    packed = fp4.pack(random_values((2, 16)), "nvfp4")
    expected = fp4.unpack(*packed, "nvfp4").view(np.uint16)
    bits = np.empty((2, 16), np.uint16)
    assert fp4.unpack(*packed, "nvfp4", dtype="bfloat16", out=bits) is bits
    assert np.array_equal(bits, expected)


def test_importing_fp4_loads_neither_torch_nor_ml_dtypes() -> None:
    script = (
        "import sys, numpy as np, kvstore.fp4, kvstore.codec\n"
        "packed = kvstore.fp4.pack(np.ones((2, 32), np.float32), 'mxfp4')\n"
        "kvstore.fp4.unpack(*packed, 'mxfp4', dtype='float32')\n"
        "assert not {'torch', 'ml_dtypes'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize(
    "make", [lambda x: x, lambda x: x.requires_grad_(), lambda x: x._neg_view()]
)
def test_tensor_views_and_parameters_are_read_as_numbers(
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = make(torch.from_numpy(random_values((4, 32))))
    packed = fp4.pack(tensor, "nvfp4")
    expected = fp4.pack(tensor.detach().resolve_neg().numpy(), "nvfp4")
    assert all(map(np.array_equal, [plane.numpy() for plane in packed], expected))


# Memory: any strides, any alignment, nothing written beside the output.


@given(data=st.data(), rule=st.sampled_from(RULES))
@quick
def test_any_shape_and_stride_gives_the_bytes_of_the_reference_and_no_other(
    data: st.DataObject, rule: tuple[str, str]
) -> None:
    entry_format, scale_rule = rule
    leading = tuple(data.draw(st.lists(st.integers(0, 4), max_size=3)))
    shape = (*leading, FORMATS[entry_format].scale_block * data.draw(st.integers(0, 5)))
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

    result = fp4.pack(values, entry_format, scale_rule=scale_rule, out=(out[0], out[1]))

    expected = numpy_fp4.pack(plain.astype(np.float32), entry_format, scale_rule)
    assert result[0] is out[0]
    assert np.array_equal(out[0], expected.codes)
    assert np.array_equal(out[1], expected.scales)
    for buffer, view in zip(buffers, out, strict=True):
        assert (rest_of(buffer, view) == REDZONE).all()

    target_buffer, target = place(shape, dtype, data.draw(strided(shape, itemsize)))
    assert fp4.unpack(out[0], out[1], entry_format, dtype=dtype, out=target) is target
    exact = numpy_fp4.unpack(expected.codes, expected.scales, entry_format)
    bits = numpy_fp4.narrow(exact, np.dtype(dtype).name)
    assert np.ascontiguousarray(target).tobytes() == bits.tobytes()
    assert (rest_of(target_buffer, target) == REDZONE).all()


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@every_format
def test_nibbles_and_scales_interleave_in_entries(entry_format: str, kind: str) -> None:
    values = random_values((3, 5, 96))
    nibble_bytes, scale_bytes = FORMATS[entry_format].planes(96)
    entries = np.full((3, 5, nibble_bytes + scale_bytes + 3), REDZONE, np.uint8)
    views = (
        entries[..., :nibble_bytes],
        entries[..., nibble_bytes : nibble_bytes + scale_bytes],
    )
    if kind == "torch":
        shared = torch.from_numpy(entries)
        planes = (
            shared[..., :nibble_bytes],
            shared[..., nibble_bytes : nibble_bytes + scale_bytes],
        )
        fp4.pack(torch.from_numpy(values), entry_format, out=planes)
        decoded = fp4.unpack(*planes, entry_format, dtype="float32").numpy()
    else:
        fp4.pack(values, entry_format, out=views)
        decoded = fp4.unpack(*views, entry_format, dtype="float32")
    expected = fp4.pack(values, entry_format)
    assert all(map(np.array_equal, views, expected))
    assert (entries[..., nibble_bytes + scale_bytes :] == REDZONE).all()
    assert np.array_equal(decoded, fp4.unpack(*expected, entry_format, dtype="float32"))


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[::-1],
        lambda x: x[:, ::2],
        lambda x: x.transpose(1, 0, 2),
        lambda x: x[:, :, 32:96],
        lambda x: np.broadcast_to(x[0, 0], (4, 128)),
        lambda x: x[:, :, ::2],  # the last axis is not contiguous: a copy
        lambda x: x.transpose(2, 0, 1)[:, :, :0],
        lambda x: x[0, 0],
    ],
)
def test_views_are_packed_as_their_copies(
    view: Callable[[NDArray[np.float32]], NDArray[np.float32]],
) -> None:
    values = view(random_values((4, 6, 128)))
    expected = fp4.pack(np.ascontiguousarray(values), "nvfp4")
    packed = fp4.pack(values, "nvfp4")
    assert all(map(np.array_equal, packed, expected))
    nibbles, scales = (np.repeat(plane, 2, axis=-1)[..., ::2] for plane in packed)
    decoded = fp4.unpack(nibbles, scales, "nvfp4", dtype="float32")
    assert np.array_equal(decoded, fp4.unpack(*expected, "nvfp4", dtype="float32"))


def test_an_output_may_run_backwards() -> None:
    values = random_values((5, 64))
    expected = fp4.pack(values, "nvfp4")
    nibbles, scales = np.zeros((5, 32), np.uint8), np.zeros((5, 4), np.uint8)
    fp4.pack(values[::-1], "nvfp4", out=(nibbles[::-1], scales[::-1]))
    assert all(map(np.array_equal, (nibbles, scales), expected))


# What a NaN, an infinity and the sign of zero become.


@pytest.mark.parametrize(("entry_format", "rule"), RULES)
@pytest.mark.parametrize("payload", [0x7FC00000, 0xFFFFFFFF, 0x7F800001, 0xFF800001])
def test_a_nan_makes_its_block_nan_and_no_other(entry_format: str, rule: str, payload: int) -> None:
    block = FORMATS[entry_format].scale_block
    for place_in_block in (0, 1, block - 1):
        values = random_values((3, block))
        clean = fp4.pack(values, entry_format, scale_rule=rule)
        values[1].view(np.uint32)[place_in_block] = payload
        values[1, place_in_block - 1] = np.inf
        stats = fp4.PackStats()
        nibbles, scales = fp4.pack(values, entry_format, scale_rule=rule, stats=stats)
        assert stats == fp4.PackStats(nan_blocks=1, inf_values=1)
        assert scales[1].tolist() == [{"nvfp4": 0x7F, "mxfp4": 0xFF}[entry_format]]
        assert not nibbles[1].any()
        assert np.array_equal(nibbles[::2], clean[0][::2])
        assert np.array_equal(scales[::2], clean[1][::2])
        decoded = fp4.unpack(nibbles, scales, entry_format, dtype="float32")
        assert (decoded[1].view(np.uint32) == 0x7FC00000).all()
        assert np.isfinite(decoded[::2]).all()


@pytest.mark.parametrize(("entry_format", "rule"), RULES)
def test_infinities_saturate_and_are_counted(entry_format: str, rule: str) -> None:
    values = np.ones((2, 64), np.float32)
    values[0, :3] = [np.inf, -np.inf, -0.0]
    stats = fp4.PackStats(inf_values=10)
    nibbles, _ = fp4.pack(values, entry_format, scale_rule=rule, stats=stats)
    assert stats == fp4.PackStats(nan_blocks=0, inf_values=12)
    assert nibbles[0, :2].tolist() == [0xF7, 0x08]


@pytest.mark.parametrize(("entry_format", "rule"), RULES)
@pytest.mark.parametrize("zero", [0.0, -0.0, 2.0**-149, -(2.0**-149)])
def test_the_sign_of_zero_and_of_what_rounds_to_it_is_kept(
    entry_format: str, rule: str, zero: float
) -> None:
    values = np.full(32, zero, np.float32)
    nibbles, scales = fp4.pack(values, entry_format, scale_rule=rule)
    assert set(nibbles.tolist()) == {0x88 if np.signbit(zero) else 0}
    decoded = fp4.unpack(nibbles, scales, entry_format, dtype="float32")
    assert (decoded == 0).all()
    assert (np.signbit(decoded) == np.signbit(zero)).all()


def test_subnormals_count_even_where_the_thread_flushes_them() -> None:
    values = np.array([2.0**-127, 2.0**-128, -3 * 2.0**-129] + [0.0] * 29, np.float32)
    expected = fp4.pack(values, "mxfp4")
    torch.set_flush_denormal(True)
    try:
        nibbles, scales = fp4.pack(values, "mxfp4")
        decoded = fp4.unpack(nibbles, scales, "mxfp4", dtype="float32")
    finally:
        torch.set_flush_denormal(False)
    assert nibbles.tobytes() == expected[0].tobytes()
    assert nibbles[0] == 0x12
    assert decoded[:2].tolist() == [2.0**-127, 2.0**-128]


def test_low_nibble_holds_the_even_value() -> None:
    values = np.array([0.5, 6.0] + [0.0] * 14, np.float32)
    assert fp4.pack(values, "nvfp4")[0][0] == 0x71


def test_relative_error_is_what_packing_loses() -> None:
    values = random_values((256, 128))
    for entry_format, rule in RULES:
        decoded = fp4.unpack(
            *fp4.pack(values, entry_format, scale_rule=rule), entry_format, dtype="float32"
        )
        expected = np.linalg.norm(decoded - values) / np.linalg.norm(values)
        found = fp4.relative_error(values, entry_format, scale_rule=rule)
        assert found == pytest.approx(expected, rel=1e-4)
        assert 0.05 < found < 0.13
    assert fp4.relative_error(torch.ones(2, 32, dtype=torch.bfloat16), "mxfp4") == 0
    assert fp4.relative_error(torch.ones(2, 32, dtype=torch.bfloat16) * 1.25, "mxfp4") == 0.2
    assert fp4.relative_error(np.zeros((2, 16), np.float32), "nvfp4") == 0
    assert np.isnan(fp4.relative_error(np.full((2, 16), np.inf, np.float32), "nvfp4"))


# Errors: they name what was found and what was expected, and write nothing.

ONES = np.ones((2, 32), np.float32)
NIBBLES, SCALES = fp4.pack(ONES, "nvfp4")


def empty(*shape: int, dtype: type[np.generic] = np.uint8) -> NDArray[np.generic]:
    return np.full(shape, REDZONE, np.uint8).astype(dtype)


def read_only(array: NDArray[np.generic]) -> NDArray[np.generic]:
    array.flags.writeable = False
    return array


SHARED = empty(2, 40)
PACK_ERRORS = {
    "list": ({"values": [1.0] * 16}, "values must be a NumPy array or a torch tensor, found list"),
    "scalar": ({"values": np.array(1.0, np.float32)}, "at least one axis, found a scalar"),
    "float64": ({"values": np.ones((2, 32))}, "float32 or float16 or bfloat16, found float64"),
    "int tensor": ({"values": torch.ones(32, dtype=torch.int32)}, "bfloat16, found int32"),
    "swapped": ({"values": ONES.astype(">f4")}, "found float32, byte-swapped"),
    "block": ({"values": ONES[:, :24]}, "multiple of the nvfp4 block of 16, found 24"),
    "format": ({"entry_format": "fp4"}, "unknown FP4 format 'fp4', expected one of nvfp4, mxfp4"),
    "other format": ({"entry_format": "mxfp8"}, "unknown FP4 format 'mxfp8'"),
    "rule": ({"scale_rule": "floor"}, "nvfp4 has no scale rule 'floor', expected one of v41, "),
    "empty rule": ({"scale_rule": ""}, "nvfp4 has no scale rule ''"),
    "v41 global": ({"global_scale": 0.5}, "rule 'v41' has no global scale, expected 1, found 0.5"),
    "mx global": ({"entry_format": "mxfp4", "global_scale": 2.0}, "mxfp4 has no global scale"),
    "zero global": ({"scale_rule": "torchao", "global_scale": 0.0}, "2\\*\\*100\\], found 0.0"),
    "nan global": ({"scale_rule": "torchao", "global_scale": float("nan")}, "found nan"),
    "out pair": ({"out": (empty(2, 16),)}, "the pair \\(nibbles, scales\\), found 1 items"),
    "out shape": ({"out": (empty(2, 15), empty(2, 2))}, "shape \\[2, 16\\], found \\[2, 15\\]"),
    "out scales": ({"out": (empty(2, 16), empty(2, 1))}, "out scales must have shape \\[2, 2\\]"),
    "out dtype": (
        {"out": (empty(2, 16, dtype=np.int8), empty(2, 2))},
        "out nibbles must have dtype uint8, found int8",
    ),
    "out kind": (
        {"out": (torch.zeros(2, 16, dtype=torch.uint8), empty(2, 2))},
        "must be a NumPy array like the input, found a torch tensor",
    ),
    "out stride": ({"out": (empty(2, 32)[:, ::2], empty(2, 2))}, "stride of 2 bytes, expected 1"),
    "out read-only": ({"out": (empty(2, 16), read_only(empty(2, 2)))}, "found a read-only array"),
    "out itself": (
        {"out": (np.ndarray((2, 16), np.uint8, empty(40), 0, (8, 1)), empty(2, 2))},
        "out nibbles overlaps itself: strides \\[8, 1\\]",
    ),
    "out each other": (
        {"out": (SHARED[:, :16], SHARED[:, 15:17])},
        "out nibbles and out scales overlap",
    ),
    "out and values": (
        {"out": (ONES.view(np.uint8)[:, :16], empty(2, 2))},
        "out nibbles and values overlap",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), PACK_ERRORS.values(), ids=PACK_ERRORS.keys())
def test_pack_errors_name_found_and_expected(change: dict[str, object], message: str) -> None:
    arguments: dict[str, Any] = {"values": ONES, "entry_format": "nvfp4", **change}
    before = ONES.tobytes()
    with pytest.raises(ValueError, match=message):
        fp4.pack(**arguments)
    planes = change.get("out", ())
    assert isinstance(planes, tuple)
    for plane in planes:
        if isinstance(plane, np.ndarray) and plane.base is not ONES and plane.dtype == np.uint8:
            assert (plane == REDZONE).all()
    assert ONES.tobytes() == before


UNPACK_ERRORS = {
    "nibble dtype": ({"nibbles": NIBBLES.view(np.int8)}, "nibbles must have dtype uint8"),
    "scale dtype": ({"scales": SCALES.astype(np.float32)}, "scales must have dtype uint8"),
    "float8": (
        {"scales": SCALES.view(ml_dtypes.float8_e4m3fn)},
        "scales must have dtype uint8, found float8_e4m3fn",
    ),
    "kinds": (
        {"scales": torch.from_numpy(SCALES)},
        "scales must be a NumPy array like the input, found a t",
    ),
    "scale shape": ({"scales": SCALES[:, :1]}, "scales must have shape \\[2, 2\\] for nvfp4"),
    "scale axes": ({"scales": SCALES[0]}, "found \\[2\\]"),
    "block": ({"nibbles": NIBBLES[:, :4]}, "multiple of the nvfp4 block of 16, found 8 values"),
    "format": ({"entry_format": "int4"}, "unknown FP4 format 'int4'"),
    "dtype": ({"dtype": "float64"}, "unknown dtype 'float64', expected one of float32, float16"),
    "bytes": ({"dtype": "uint8"}, "dtype must be float32 or float16 or bfloat16, found uint8"),
    "global": ({"global_scale": -1.0}, "global_scale must lie in .* found -1.0"),
    "out dtype": ({"out": np.empty((2, 32), np.float16)}, "out must have dtype float32, found f"),
    "out bits": ({"out": np.empty((2, 32), np.uint16)}, "out must have dtype float32, found uint"),
    "out shape": ({"out": np.empty((2, 31), np.float32)}, "out must have shape \\[2, 32\\]"),
    "out overlap": (
        {"out": np.zeros((2, 32), np.float32), "nibbles": None},
        "out and nibbles overlap",
    ),
}


@pytest.mark.parametrize(("change", "message"), UNPACK_ERRORS.values(), ids=UNPACK_ERRORS.keys())
def test_unpack_errors_name_found_and_expected(change: dict[str, object], message: str) -> None:
    arguments: dict[str, Any] = {"nibbles": NIBBLES, "scales": SCALES, "entry_format": "nvfp4"}
    arguments |= {"dtype": "float32", **change}
    if arguments["nibbles"] is None:
        out = arguments["out"]
        assert isinstance(out, np.ndarray)
        arguments["nibbles"] = out.view(np.uint8)[:, 96:112]
    with pytest.raises(ValueError, match=message):
        fp4.unpack(**arguments)


def test_strides_too_odd_to_tell_apart_are_refused() -> None:
    # Deciding whether these two share a byte takes too long; refusing is safe.
    buffer = np.zeros(9_000_000, np.uint8)
    shape = (40, 38, 38)
    nibbles = np.ndarray((*shape, 16), np.uint8, buffer, 0, (211_111, 5_309, 137, 1))
    scales = np.ndarray((*shape, 2), np.uint8, buffer, 60, (211_113, 5_311, 139, 1))
    with pytest.raises(ValueError, match="out nibbles and out scales overlap"):
        fp4.pack(np.ones((*shape, 32), np.float32), "nvfp4", out=(nibbles, scales))


# Tensors of other devices; their code paths run on the host too.


def test_results_move_to_the_device_or_into_out() -> None:
    values = torch.from_numpy(random_values((3, 32)))
    expected = fp4.pack(values, "nvfp4")
    cpu = torch.device("cpu")
    names = ("out nibbles", "out scales")
    moved = quantized._to_device(expected, cpu, None, names)
    assert all(map(torch.equal, moved, expected))
    out = (torch.zeros(3, 16, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8))
    assert quantized._to_device(expected, cpu, out, names)[0] is out[0]
    assert all(map(torch.equal, out, expected))
    with pytest.raises(ValueError, match="out scales must have shape, dtype and device"):
        quantized._to_device(expected, cpu, (out[0], out[0]), names)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_device_decoding_checks_and_fills_out(dtype: str) -> None:
    planes = fp4.pack(torch.from_numpy(random_values((2, 3, 64))), "mxfp4")
    expected = fp4.unpack(*planes, "mxfp4", dtype=dtype)
    kernel = quantized.Kernel("mxfp4", "floor")
    found = quantized._unpack_remote(planes, kernel, dtype, None)
    assert torch.equal(found, expected)
    out = torch.empty_like(expected)
    assert quantized._unpack_remote(planes, kernel, dtype, out) is out
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match="out must have shape, dtype and device"):
        quantized._unpack_remote(planes, kernel, dtype, out[:1])
    with pytest.raises(ValueError, match="scales must have shape, dtype and device"):
        quantized._unpack_remote((planes[0], planes[1].int()), kernel, dtype, None)


def test_a_device_out_is_refused_for_host_values() -> None:
    remote = torch.empty(2, 16, dtype=torch.uint8, device="meta")
    local = torch.empty(2, 2, dtype=torch.uint8)
    with pytest.raises(ValueError, match="on the input's device, cpu, found meta"):
        fp4.pack(torch.ones(2, 32), "nvfp4", out=(remote, local))
