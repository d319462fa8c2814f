"""vLLM keeps its KV cache in kvstore: ``kvstore.engine.vllm:KVStoreConnector``.

See docs/vllm.md. Importing this without vLLM raises ``ImportError``.
"""

from __future__ import annotations

from kvstore.distribution import install_command

try:
    import vllm as _vllm  # noqa: F401 - whether it is there
except ImportError as error:
    _MESSAGE = (
        "kvstore.engine.vllm needs vLLM, which cannot be imported here "
        f"({error}); install it, then run: {install_command('vllm')} (docs/vllm.md)"
    )
    raise ImportError(_MESSAGE) from error

from kvstore.engine.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
