"""Result of one engine: JSON fields, table and sentence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.cli.demo.engines import BLOCK_TOKENS, NEW_TOKENS, EngineName
from kvstore.index.plan import hit_limit

REFERENCE_TOLERANCE = 1e-9
"""Difference up to which reference logits (binary64) are equal: rounding depends on shapes."""
STAGES = ("open", "lookup", "read", "restore", "forward")
"""Stages of a warm TTFT, in order. ``read`` verifies in the same pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of one engine. The fields are those of ``kvstore demo --json``, in order."""

    engine: EngineName
    model: str
    dtype: str
    threads: int
    prompt_tokens: int
    hit_tokens: int
    replay_tokens: int
    cold_ttft_s: float
    warm_ttft_s: float
    """In the second process, with the new file still in the page cache."""
    speedup: float
    ttft_parts: Mapping[str, float]
    """Of the warm TTFT, in seconds."""
    page_cache: str
    cold_disk_ttft_s: float | None
    """In a third process, after a request to drop the file from the page cache."""
    cold_disk_parts: Mapping[str, float] | None
    cold_disk_page_cache: str | None
    """``"dropped"`` if the disk was read, ``"kept"`` if not, ``"unknown"`` without a count of bytes."""
    pool_ttft_s: float | None
    """In the first process, with the window in the pool: for models that have windows."""
    bytes_per_token: float
    ssd_bytes_per_token: float
    same_tokens: bool
    max_logit_diff: float
    """Restored against cold; where windows exist, with the window from the pool."""
    replayed_same_tokens: bool | None
    replayed_logit_diff: float | None
    """The same after a replay, which is an approximation: a difference is no error."""
    unchunked_ttft_s: float | None
    unchunked_logit_diff: float | None
    """Differences between the cold run in chunks and one without chunks."""
    continuation: str
    """The text of the second process, empty if the model has no text."""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain JSON values."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def failures(self) -> list[str]:
        """One sentence for each failed check."""
        found = []
        expected = hit_limit(self.prompt_tokens, BLOCK_TOKENS)
        if self.hit_tokens != expected:
            found.append(f"restored {self.hit_tokens} tokens, expected {expected}")
        if not self.same_tokens:
            found.append("the restored run continued with other tokens than the cold run")
        tolerance = REFERENCE_TOLERANCE if self.engine == "reference" else 0.0
        if not self.max_logit_diff <= tolerance:  # also when it is not a number
            found.append(
                f"logits differ by {self.max_logit_diff:.3g}, expected at most {tolerance:g}"
            )
        return [f"{self.engine}: {sentence}" for sentence in found]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _difference(value: float | None) -> str:
    return "-" if value is None else "0 (exact)" if value == 0 else f"{value:.2g}"


def _yes(value: bool | None) -> str:  # noqa: FBT001 - a value
    return "-" if value is None else "yes" if value else "no"


def table_rows(report: Report) -> list[tuple[str, str]]:
    """Return the rows of one report's table: label and value."""
    parts = [(f"    {stage}", _seconds(report.ttft_parts[stage])) for stage in STAGES]
    return [
        ("model", report.model),
        ("number format", f"{report.dtype}, threads: {report.threads}"),
        ("prompt", f"{report.prompt_tokens:,} tokens"),
        ("restored from the store", f"{report.hit_tokens:,} tokens"),
        ("    of these replayed", f"{report.replay_tokens:,} tokens"),
        ("first token, cold", _seconds(report.cold_ttft_s)),
        ("first token, window in the pool", _seconds(report.pool_ttft_s)),
        ("first token, second process", _seconds(report.warm_ttft_s)),
        *parts,
        ("    speedup over cold", f"{report.speedup:.1f} x"),
        (
            f"first token, page cache {report.cold_disk_page_cache or 'dropped'}",
            _seconds(report.cold_disk_ttft_s),
        ),
        ("bytes per token, by the layout", f"{report.bytes_per_token:,.0f}"),
        ("bytes per token, on SSD", f"{report.ssd_bytes_per_token:,.0f}"),
        (f"same {NEW_TOKENS} tokens as cold", _yes(report.same_tokens)),
        ("    after a replay", _yes(report.replayed_same_tokens)),
        ("largest difference of a logit", _difference(report.max_logit_diff)),
        ("    after a replay", _difference(report.replayed_logit_diff)),
    ]


def summary(report: Report) -> str:
    """Return the result as sentences."""
    left = report.prompt_tokens - report.hit_tokens
    sentence = (
        f"{report.engine}: the first token of the second process is {report.speedup:.1f} times faster, "
        f"{_seconds(report.warm_ttft_s)} instead of {_seconds(report.cold_ttft_s)}: it restored "
        f"{report.hit_tokens:,} of {report.prompt_tokens:,} tokens and computed the other {left:,}"
    )
    if report.replay_tokens:
        sentence += f", after a replay of the last {report.replay_tokens:,} restored ones"
    if report.replayed_logit_diff is not None:
        near = "exactly" if report.max_logit_diff == 0 else f"to {report.max_logit_diff:.2g}"
        sentence += (
            f". With the window in the pool of the first process, logits are {near} those of the cold run. A "
            f"replay is an approximation: logits differ by up to {_difference(report.replayed_logit_diff)}, and "
            f"the {NEW_TOKENS} tokens are {'the same' if report.replayed_same_tokens else 'different'} (the "
            "weights are random: no conclusion about a trained model)"
        )
    elif report.same_tokens and report.max_logit_diff == 0:
        sentence += f". Its {NEW_TOKENS} tokens and their logits equal the cold run's bit for bit"
    return sentence + "."
