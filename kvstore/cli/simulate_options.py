"""Options of ``kvstore simulate``, as given on the command line."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from kvstore.cli.parameters import BlockSize, FormatOption, Unchained

if TYPE_CHECKING:
    from kvstore.simulate.cost import ModelBytes
    from kvstore.simulate.results import Report
    from kvstore.simulate.run import SimulateOptions
    from kvstore.simulate.window import Windows
    from kvstore.trace.columns import Trace

SIZES = "1%,5%,10%,25%,50%"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateArguments:
    """Options that determine a result. The text below each is its help."""

    policy: str = "lru,arc,s3fifo,optimal"
    """Policies, separated by commas; `kvstore policies` lists them. `optimal` is the upper bound: it
    knows the future and may decline to store."""
    size: str | None = None
    """Cache sizes, separated by commas: a share of all distinct blocks such as 5%, blocks such as 20000b,
    or bytes such as 64GiB. Default: 1%,5%,10%,25%,50%."""
    warmup: float = 0.0
    """Share of the requests that warm up the cache and are not counted."""
    semantics: Literal["prefix", "flat"] = "prefix"
    """prefix: a block hits only if all blocks before it hit. flat: blocks are independent, as in other
    simulators."""
    format: FormatOption = "auto"
    block_size: BlockSize = 0
    unchained: Unchained = "refuse"
    tier: Annotated[tuple[str, ...], Parameter(negative="")] = ()
    """A tier, fastest first; repeat for each: NAME=SIZE[@RATE], such as device=64GiB@200GB/s or
    ssd=1TiB@3GB/s,write=on-evict. Other settings: latency=100us, policy=arc."""
    exclusive: Annotated[bool, Parameter(negative="--inclusive")] = False
    """Keep each block in one tier only; --inclusive keeps it in lower tiers too."""
    request_share: float | None = None
    """Largest share of the cache, and of each tier, that one request may use; a longer request keeps its
    first blocks. Default: no limit, as in other simulators."""
    model: str | None = None
    """Preset name or path of a config.json; gives bytes per token and window sizes."""
    bytes_per_token: float | None = None
    """Bytes per cached token, instead of a model."""
    prefill_tps: float | None = None
    """Prefill speed of the engine in tokens per second, for times to first token."""
    bandwidth: str | None = None
    """Read bandwidth of the cache of --size, such as 3GB/s. Default: reads take no time."""
    window_tokens: int | None = None
    """Window size W of the window pool, where the model does not give it."""
    window_ttl: str | None = None
    """TTL of a window, such as 300s."""
    window_bytes: str | None = None
    """Capacity of the window pool: bytes such as 2GiB, or a share of all prompts' windows such as 10%."""

    def as_dict(self) -> dict[str, Any]:
        """Return the options as JSON has them."""
        return {**asdict(self), "size": self.size or SIZES, "tier": list(self.tier)}

    def check(self) -> None:
        """Refuse values that are invalid for every trace.

        Numbers below 2**-60 are rounding errors, and their quotients are not finite.
        """
        from kvstore.trace.fields import shown

        for name, number in (
            ("--block-size", self.block_size or None),
            ("--bytes-per-token", self.bytes_per_token),
            ("--prefill-tps", self.prefill_tps),
            ("--window-tokens", self.window_tokens),
        ):
            if number is not None and not 2**-60 <= number < 2**60:  # NaN is not
                raise ValueError(f"{name} must be above 0 and below 2**60, found {shown(number)}")
        for name, text in (("--policy", self.policy), ("--size", self.size)):
            if text is not None and not _names(text):
                raise ValueError(f"{name} must have at least one item, found {text!r}")
        share, has_model = self.request_share, self.model is not None
        has_bytes = self.bytes_per_token is not None
        if share is not None and not 0 < share <= 1:
            msg = f"--request-share must be above 0 and at most 1, found {share}"
        elif has_model and has_bytes:
            msg = f"--model {self.model} gives the bytes per token; leave out --bytes-per-token"
        elif self.prefill_tps is not None and not has_model and not has_bytes:
            msg = "--prefill-tps needs the bytes per token: give --model or --bytes-per-token too"
        elif self.bandwidth is not None and self.prefill_tps is None:
            msg = "--bandwidth is for times to first token: give --prefill-tps too"
        else:
            return
        raise ValueError(msg)

    def for_trace(self, trace: Trace) -> SimulateOptions:
        """Return the options in the blocks and bytes of one trace."""
        from kvstore.output.sizes import rate_of, size_of
        from kvstore.simulate.cost import Cost, Link, ModelBytes, bytes_of_model
        from kvstore.simulate.hierarchy import tiers_of
        from kvstore.simulate.run import SimulateOptions, interval_of
        from kvstore.simulate.tiers import Inclusion

        blocks, sized = trace.distinct_blocks, None
        if self.model is not None:
            sized = bytes_of_model(self.model)
        elif self.bytes_per_token is not None:
            sized = ModelBytes(Fraction(self.bytes_per_token))
        token_bytes = None if sized is None else sized.token_bytes
        block_bytes = None if token_bytes is None else token_bytes * trace.block_tokens
        inclusion: Inclusion = "exclusive" if self.exclusive else "inclusive"
        cost = None
        if self.prefill_tps is not None and token_bytes is not None:
            cost = Cost(token_bytes, self.prefill_tps)
        return SimulateOptions(
            policies=_names(self.policy),
            sizes=[size_of(each, blocks, block_bytes) for each in _names(self.size or SIZES)],
            interval=interval_of(self.warmup),
            semantics=self.semantics,
            token_bytes=token_bytes,
            cost=cost,
            link=Link(None if self.bandwidth is None else rate_of(self.bandwidth), 0.0),
            tiers=tiers_of(self.tier, inclusion, blocks, block_bytes),
            inclusion=inclusion,
            windows=self._windows(trace, sized),
        )

    def _windows(self, trace: Trace, sized: ModelBytes | None) -> Windows | None:
        """Return the window pool; None if neither an option nor the model has a W."""
        from kvstore.output.sizes import seconds_of, size_of
        from kvstore.simulate.window import Windows, all_window_tokens

        tokens = self.window_tokens or (sized.window_tokens if sized is not None else 0)
        if not tokens:
            if self.window_ttl is not None or self.window_bytes is not None:
                raise ValueError("a window pool needs --window-tokens, or a --model with windows")
            return None
        budget = None
        if self.window_bytes is not None:
            row_bytes = sized.window_token_bytes if sized is not None else None
            if self.window_bytes.endswith("b"):
                msg = f"expected --window-bytes as 2GiB or 10%, found {self.window_bytes!r}"
                raise ValueError(msg)
            whole = all_window_tokens(trace, tokens)
            budget = size_of(self.window_bytes, whole, row_bytes or None).blocks
        ttl = 300.0 if self.window_ttl is None else seconds_of(self.window_ttl)
        return Windows(tokens, ttl, budget)

    def command(self, path: Path, **changed: str) -> str:
        """Return the command with these options, some of them ``changed``."""
        words = ["kvstore", "simulate", str(path)]
        defaults = asdict(DEFAULTS)
        for name, value in (self.as_dict() | changed).items():
            is_always = name in {"policy", "size"}
            if name not in {"tier", "exclusive"} and (is_always or value != defaults[name]):
                words += [f"--{name.replace('_', '-')}", str(value).removesuffix(".0")]
        for tier in self.tier:
            words += ["--tier", tier]
        if self.tier and self.exclusive:
            words.append("--exclusive")
        return shlex.join(words)

    def recommended_command(self, path: Path, report: Report) -> str:
        """Return the command that simulates the choice, with prefix semantics."""
        advice = report.recommendation
        changed = {"policy": advice.policy, "semantics": "prefix"}
        if advice.choice is not None:
            changed["size"] = f"{advice.choice.size_blocks}b"
        if advice.window is not None:
            changed["window_ttl"] = f"{advice.window.ttl_seconds:g}s"
        return self.command(path, **changed)


DEFAULTS = SimulateArguments()


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]
