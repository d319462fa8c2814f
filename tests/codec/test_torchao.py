"""FP4 beside torchao, bit for bit. Where the two are known to differ, the difference is asserted.

What is asserted to differ is torchao's own: an upstream fix fails a test here, and is then noticed.
"""

from __future__ import annotations

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvstore import fp4
from kvstore.layout import SCALE_RULES

pytest.importorskip("torchao", reason="torchao is not installed: make test installs it")

from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize

pytestmark = pytest.mark.usefixtures("level")

Planes = tuple[NDArray[np.uint8], NDArray[np.uint8]]

MX_NAN, NV_NAN = 0xFF, 0x7F
E2M1 = torch.float4_e2m1fn_x2
MODES: Mapping[str, ScaleCalculationMode] = {
    "floor": ScaleCalculationMode.FLOOR,
    "even": ScaleCalculationMode.EVEN,
    "rceil": ScaleCalculationMode.RCEIL,
}
BITS = {"float32": torch.int32, "float16": torch.int16, "bfloat16": torch.int16}
TORCH = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

every_mx_rule = pytest.mark.parametrize("rule", SCALE_RULES["mxfp4"])
every_source = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
every_target = pytest.mark.parametrize("target", [*BITS])


def pack_here(
    values: torch.Tensor, entry_format: str, rule: str, global_scale: float = 1.0
) -> Planes:
    nibbles, scales = fp4.pack(values, entry_format, scale_rule=rule, global_scale=global_scale)
    return nibbles.numpy(), scales.numpy()


def mx_of_torchao(values: torch.Tensor, rule: str) -> Planes:
    scales, nibbles = to_mx(values, E2M1, 32, MODES[rule])
    return nibbles.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy()


def nv_of_torchao(values: torch.Tensor, global_scale: float | None) -> Planes:
    g = None if global_scale is None else torch.tensor(global_scale)
    scales, nibbles = nvfp4_quantize(values, 16, g)
    return nibbles.view(torch.uint8).numpy(), scales.view(torch.uint8).numpy()


def differ(ours: NDArray[np.uint8], theirs: NDArray[np.uint8], block: int) -> NDArray[np.bool_]:
    """Blocks of which any nibble differs."""
    found: NDArray[np.bool_] = np.any((ours != theirs).reshape(-1, block // 2), axis=1)
    return found


def every_bfloat16_as_the_largest(block: int) -> torch.Tensor:
    """65,536 blocks: in each the pattern, and shares of its magnitude in both signs."""
    patterns = np.arange(65536, dtype=np.uint32)
    shares = np.arange(block, dtype=np.uint32)
    blocks = (patterns[:, None] & 0x7FFF) * shares // (block - 1) | (shares % 2) << 15
    blocks[patterns, patterns % block] = patterns
    return torch.from_numpy(blocks.astype(np.uint16).view(np.int16)).view(torch.bfloat16)


def random_blocks(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Rows of 128 numbers of several kinds; none is so small that its MX scale is byte 0."""
    rng = np.random.default_rng(0)
    gauss = rng.standard_normal((1024, 128)).astype(np.float32)
    powers = rng.integers(-110, 111, (1024, 4)).repeat(32, axis=1)
    near_max = rng.uniform(0.25, 1, (64, 128)) * float(np.finfo(np.float32).max) * 0.99
    found = {
        "gauss": gauss,
        "wide": np.ldexp(gauss, powers).astype(np.float32),
        "near the largest": near_max.astype(np.float32),
        "zeros": np.zeros((4, 128), np.float32),
        "infinities": np.where(rng.random((64, 128)) < 0.02, np.float32(-np.inf), gauss[:64]),
    }
    return {name: torch.from_numpy(values).to(dtype) for name, values in found.items()}


# What is equal.


@every_mx_rule
@every_source
def test_mxfp4_of_every_bfloat16_as_the_largest(rule: str, dtype: torch.dtype) -> None:
    values = every_bfloat16_as_the_largest(32).to(dtype)
    ours, theirs = pack_here(values, "mxfp4", rule), mx_of_torchao(values, rule)
    assert np.array_equal(ours[1], theirs[1])
    # Those two scales are the divergences below.
    alike = (ours[1].ravel() != 0) & (ours[1].ravel() != MX_NAN)
    assert not differ(ours[0], theirs[0], 32)[alike].any()
    assert alike.sum() > 64_000


@every_source
def test_nvfp4_of_every_bfloat16_as_the_largest(dtype: torch.dtype) -> None:
    values = every_bfloat16_as_the_largest(16).to(dtype)
    ours, theirs = pack_here(values, "nvfp4", "torchao"), nv_of_torchao(values, None)
    assert np.array_equal(ours[1], theirs[1])
    alike = ours[1].ravel() != NV_NAN
    assert not differ(ours[0], theirs[0], 16)[alike].any()
    assert (~alike).sum() == 2 * 127  # the NaNs


@every_mx_rule
@every_source
def test_mxfp4_of_random_blocks(rule: str, dtype: torch.dtype) -> None:
    for name, values in random_blocks(dtype).items():
        ours, theirs = pack_here(values, "mxfp4", rule), mx_of_torchao(values, rule)
        assert all(map(np.array_equal, ours, theirs)), name


@every_source
@pytest.mark.parametrize("global_scale", [None, 1.0, 0.37, 2.0**-9, 3.0e4])
def test_nvfp4_of_random_blocks(dtype: torch.dtype, global_scale: float | None) -> None:
    for name, values in random_blocks(dtype).items():
        ours = pack_here(values, "nvfp4", "torchao", global_scale or 1.0)
        theirs = nv_of_torchao(values, global_scale)
        assert all(map(np.array_equal, ours, theirs)), name


def every_scale_and_nibble(block: int) -> tuple[torch.Tensor, torch.Tensor]:
    nibbles = torch.tensor([i | (i + 1) << 4 for i in range(0, 16, 2)] * (block // 16))
    return nibbles.to(torch.uint8).repeat(256, 1), torch.arange(256, dtype=torch.uint8)[:, None]


def unpacked_differs(ours: torch.Tensor, theirs: torch.Tensor, target: str) -> NDArray[np.bool_]:
    """Which numbers differ in any bit. NaNs are one: torchao's have other payloads."""
    same = (ours.view(BITS[target]) == theirs.view(BITS[target])) | (ours.isnan() & theirs.isnan())
    found: NDArray[np.bool_] = ~same.numpy()
    return found


@pytest.mark.parametrize("target", ["float32", "bfloat16"])
def test_unpacked_mxfp4(target: str) -> None:
    nibbles, scales = every_scale_and_nibble(32)
    ours = fp4.unpack(nibbles, scales, "mxfp4", dtype=target)
    theirs = to_dtype(nibbles, scales.view(torch.float8_e8m0fnu), E2M1, 32, TORCH[target])
    assert not unpacked_differs(ours, theirs, target).any()
    assert ours.isnan().sum() == 32


def unpacked_nv(target: str, global_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    nibbles, scales = every_scale_and_nibble(16)
    theirs = NVFP4Tensor(
        nibbles,
        scales.view(torch.float8_e4m3fn),
        16,
        torch.float32,
        torch.tensor(global_scale),
    )
    ours = fp4.unpack(nibbles, scales, "nvfp4", dtype=target, global_scale=global_scale)
    return ours, theirs.dequantize(TORCH[target])


@every_target
@pytest.mark.parametrize("global_scale", [1.0, 2.0**-9])
def test_unpacked_nvfp4(target: str, global_scale: float) -> None:
    ours, theirs = unpacked_nv(target, global_scale)
    assert not unpacked_differs(ours, theirs, target).any()
    assert ours.isnan().sum() == 32


# Where torchao is known to differ.


def test_just_above_one_and_a_half_torchao_rounds_a_logarithm_down() -> None:
    # log2(amax / 6) of these is an integer once it is rounded to a float. The exact one is above.
    powers = np.arange(-120, 126)
    amax = np.nextafter(np.ldexp(np.float32(1.5), powers), np.float32(np.inf))
    values = torch.zeros(len(powers), 32)
    values[:, 0] = torch.from_numpy(amax.astype(np.float32))
    ours = pack_here(values, "mxfp4", "rceil")[1].ravel().astype(int)
    theirs = mx_of_torchao(values, "rceil")[1].ravel().astype(int)
    assert (ours == powers + 126).all()
    assert set((ours - theirs).tolist()) <= {0, 1}
    assert (ours != theirs).mean() > 0.5  # near 2, the float has bits enough


@every_mx_rule
def test_torchao_divides_by_another_scale_than_byte_0_means(rule: str) -> None:
    values = every_bfloat16_as_the_largest(32).float()
    theirs = mx_of_torchao(values, rule)
    least = theirs[1].ravel() == 0
    # Byte 0 means 2**-127. Under floor and even torchao takes 2**-126, under rceil 1.
    scaled = values[torch.from_numpy(least)].double().numpy() * (1 if rule == "rceil" else 2.0**126)
    codes = scaled.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    assert np.array_equal(theirs[0][least], codes[:, ::2] | codes[:, 1::2] << 4)
    ours = pack_here(values, "mxfp4", rule)
    assert differ(ours[0][least], theirs[0][least], 32).mean() > 0.9


def test_torchao_rounds_the_scale_to_float16_before_it_multiplies() -> None:
    nibbles, scales = every_scale_and_nibble(32)
    ours = fp4.unpack(nibbles, scales, "mxfp4", dtype="float16")
    theirs = to_dtype(nibbles, scales.view(torch.float8_e8m0fnu), E2M1, 32, torch.float16)
    where = unpacked_differs(ours, theirs, "float16")
    is_zero = np.resize(np.arange(16) % 8 == 0, (256, 32))
    # Scales that are less than the least float16, and 2**16, which is infinite as one.
    assert np.flatnonzero((where & ~is_zero).any(axis=1)).tolist() == [100, 101, 102, 143]
    # Zero times that infinity is NaN.
    assert np.flatnonzero((where & is_zero).any(axis=1)).tolist() == [*range(143, 255)]
    assert (ours.numpy()[:255][is_zero[:255]] == 0).all()
    assert np.isnan(theirs.numpy()[143:][is_zero[143:]]).all()


def test_torchao_rounds_scale_and_global_scale_before_it_multiplies() -> None:
    ours, theirs = unpacked_nv("float32", 0.37)
    where = unpacked_differs(ours, theirs, "float32")
    steps = ours.view(torch.int32).numpy() - theirs.view(torch.int32).numpy()
    assert where.sum() == 540
    assert set(np.abs(steps[where]).tolist()) == {1}


NAN = [(0x7FC00000, 0x3), (0x7F800001, 0x3), (0xFFFFFFFF, 0xC)]


@pytest.mark.parametrize(("bits", "payload"), NAN)
def test_torchao_leaves_garbage_in_the_nibbles_of_a_nan_block(bits: int, payload: int) -> None:
    values = torch.zeros(1, 32)
    values.numpy().view(np.uint32)[0, 0] = bits
    for rule in ("floor", "even", "rceil"):
        ours, theirs = pack_here(values, "mxfp4", rule), mx_of_torchao(values, rule)
        assert ours[1].tolist() == theirs[1].tolist() == [[MX_NAN]]
        assert not ours[0].any()
        # Under rceil the whole block is multiplied by a NaN.
        expected = [0x33] * 16 if rule == "rceil" else [payload] + [0] * 15
        assert theirs[0][0].tolist() == expected
    ours, theirs = (
        pack_here(values[:, :16].contiguous(), "nvfp4", "torchao"),
        nv_of_torchao(values[:, :16].contiguous(), None),
    )
    assert ours[1].tolist() == theirs[1].tolist() == [[NV_NAN]]
    assert not ours[0].any()
    assert theirs[0].tolist() == [[0x44] * 8]


def test_an_infinity_is_what_it_is_in_torchao() -> None:
    values = torch.ones(1, 32)
    values[0, :2] = torch.tensor([torch.inf, -torch.inf])
    for rule, scale in {"floor": 253, "even": 253, "rceil": 254}.items():
        ours, theirs = pack_here(values, "mxfp4", rule), mx_of_torchao(values, rule)
        assert ours[1].tolist() == theirs[1].tolist() == [[scale]]
        assert ours[0].tolist() == theirs[0].tolist() == [[0xF7] + [0] * 15]
    ours, theirs = pack_here(values, "nvfp4", "torchao"), nv_of_torchao(values, None)
    assert ours[1].tolist() == theirs[1].tolist() == [[0x7E, 0x23]]
    assert all(map(np.array_equal, ours, theirs))
