"""What the tests of codecs share."""

from __future__ import annotations

import pytest

from kvstore.codec import native


@pytest.fixture(params=native.levels())
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Make each level that this processor has the default, one after the other."""
    level: str = request.param
    monkeypatch.setattr(native, "default_level", lambda: level)
    return level
