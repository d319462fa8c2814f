"""Bytes of an engine, wherever they are, as host memory. It knows no layout and imports no torch."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray


def on_host(array: Any) -> NDArray[Any] | None:
    """Return a NumPy array or a torch tensor as a host array, None for anything else.

    Cost: none for what is on the host already, one copy for a tensor of another device.
    """
    torch = sys.modules.get("torch")  # a tensor can only come from a torch that is imported
    if torch is not None and isinstance(array, torch.Tensor):
        array = array.detach().cpu().numpy()
    return array if isinstance(array, np.ndarray) else None
