"""Parameters of several commands."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

Flag = Annotated[bool, Parameter(negative="")]
Json = Annotated[
    bool, Parameter(name="--json", negative="", help="Print JSON instead of text and tables.")
]
File = Annotated[Path, Parameter(allow_leading_hyphen=True)]
"""A file, or ``-`` for a standard stream."""
Files = Annotated[tuple[Path, ...], Parameter(negative="", allow_leading_hyphen=True)]
BlockSize = Annotated[int, Parameter(help="Tokens of a block, if the trace has no block size.")]
Unchained = Annotated[
    Literal["refuse", "rekey"],
    Parameter(help="Refuse ids that name blocks and not prefixes, or re-key them to prefixes."),
]
FormatOption = Annotated[
    Literal["auto", "mooncake", "bailian", "lmcache", "weka", "azure", "burstgpt"],
    Parameter(name="--format", help="Format of the trace; auto recognises it."),
]
