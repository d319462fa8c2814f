"""``kvstore simulate`` and ``kvstore policies``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from kvstore.command.parameters import BlockSize, Files, Json, Unchained
from kvstore.command.terminal import OK, progress, write_json, write_line, write_table


def simulate(
    traces: Files,
    /,
    *,
    policy: str = "lru,arc,s3fifo,optimal",
    size: str = "1%,5%,10%,25%,50%",
    window: Literal["all", "last_half"] = "all",
    semantics: Literal["prefix", "flat"] = "prefix",
    block_size: BlockSize = 0,
    bytes_per_token: float | None = None,
    unchained: Unchained = "refuse",
    as_json: Json = False,
) -> int:
    """Tell what caches of these sizes and policies would have hit on recorded traces.

    A block counts as hit only if all before it are there too, as an engine needs it. "optimal" is the
    bound: it knows the future and may decline to store.

    Parameters
    ----------
    traces
        Files or directories; - is standard input. Plain, gzip, zstd or tar.
    policy
        Names, with commas between them; kvstore policies lists them.
    size
        Sizes, with commas between them: a share of all distinct blocks such as 5%, blocks such as
        20000b, or bytes such as 64GiB.
    window
        Count all requests, or the last half of them with the first as a warm-up.
    semantics
        prefix, or flat: single blocks without an order between them, as other simulators have it.
    bytes_per_token
        What a cached token takes, for sizes in bytes.
    as_json
        Print an object, or an array with one for each of several traces, instead of tables.
    """
    from fractions import Fraction

    from kvstore.simulate.run import Simulation
    from kvstore.simulate.run import simulate as run
    from kvstore.simulate.sizes import size_of
    from kvstore.trace.reading import Options, read

    if block_size < 0 or (bytes_per_token is not None and not 0 < bytes_per_token < 2**60):
        msg = f"expected sizes above 0, found blocks of {block_size} tokens of {bytes_per_token} bytes"
        raise ValueError(msg)
    options = Options(block_tokens=block_size, unchained=unchained)
    results = []
    for path in traces:
        progress()(f"reading {path}")
        recorded = read(path, options)
        simulation = Simulation(recorded)
        block_bytes = Fraction(bytes_per_token) * recorded.block_tokens if bytes_per_token else None
        sizes = [size_of(each, recorded.distinct_blocks, block_bytes) for each in _names(size)]
        found = run(
            simulation,
            _names(policy),
            sizes,
            window=window,
            semantics=semantics,
            progress=progress(),
        )
        results.append(found)
        if not as_json:
            _write_simulation(recorded.name, found)
    if as_json:
        write_json(results[0] if len(results) == 1 else results)
    return OK


def _names(text: str) -> list[str]:
    return [each.strip() for each in text.split(",") if each.strip()]


def _write_simulation(name: str, found: Mapping[str, Any]) -> None:
    """Print the rows of one trace, and the ceiling, with the sizes that its LRU curve speaks for."""
    ceiling = {"policy": "ceiling", "size_fraction": 1.0, **found["ceiling"]}
    rows = [
        [
            row["policy"],
            f"{row['size_blocks']:,}",
            *(f"{row[share]:.2%}" for share in _SHARES.values()),
        ]
        for row in [*found["rows"], ceiling]
    ]
    write_line(f"{name}: what was hit, as a share of what was asked")
    write_table(["policy", "blocks", *_SHARES], rows)
    advice = found["recommendation"]
    sizes = [
        (f"{share} of the ceiling", f"{blocks:,}" if blocks is not None else "-")
        for share, blocks in advice["sizes"].items()
    ]
    sizes.append(("knee of the curve", f"{advice['knee']['size_blocks']:,}"))
    write_table(["LRU reaches", "with blocks"], sizes)


_SHARES = {
    "size": "size_fraction",
    "tokens": "prefix_token_hit_ratio",
    "prefix": "prefix_hit_ratio",
    "any block": "block_hit_ratio",
    "requests": "requests_with_hit_ratio",
}
"""Columns of a simulation, and the field that each shows."""


def policies(*, as_json: Json = False) -> int:
    """List the eviction policies.

    Parameters
    ----------
    as_json
        Print an array instead of a table.
    """
    from kvstore.policy.registry import POLICIES
    from kvstore.simulate.optimal import SUMMARY
    from kvstore.simulate.run import OPTIMAL

    found = [
        {"policy": name, "summary": entry.summary, "source": entry.source, "online": True}
        for name, entry in POLICIES.items()
    ]
    found.append({"policy": OPTIMAL, "summary": SUMMARY, "source": "Belady 1966", "online": False})
    if as_json:
        write_json(found)
    else:
        write_table(
            ["policy", "what goes", "source"],
            [(str(row["policy"]), str(row["summary"]), str(row["source"])) for row in found],
        )
    return OK
