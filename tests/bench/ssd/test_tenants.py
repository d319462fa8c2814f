"""Benchmark of many tenants: its counts are right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.ssd.tenants import main


def test_it_tells_time_room_and_opening(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tenants", "400", "--ssd-bytes", "2MiB", "--dir", str(tmp_path)]
    main([*options, "--block-bytes", "16384", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["tenants"] == 400
    assert found["namespaces"] == found["stored_blocks"] <= found["blocks"] < 128
    assert found["blocks"] >= 0.95 * found["alone_blocks"]
    assert found["open_seconds"] > 0
    main([*options, "--block-bytes", "16384"])
    assert "400 tenants" in capsys.readouterr().out
