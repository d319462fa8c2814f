"""Counters, their JSON, and the alarm of a store without hits."""

from __future__ import annotations

import json
import logging

import pytest

from kvstore.store.metrics import ALARM_LOOKUPS, ALARM_STORED_BLOCKS, Metrics


def silent_hitless() -> Metrics:
    return Metrics(stored_blocks=ALARM_STORED_BLOCKS, block_lookups_without_hit=ALARM_LOOKUPS)


def test_totals_are_sums_over_tiers_and_reasons() -> None:
    metrics = Metrics()
    metrics.hit_tokens.update(device=128, ssd=512)
    metrics.dropped_blocks.update(queue_full=3, no_parent=4)
    metrics.corrupt_blocks.update(header=1, checksum=2)
    assert metrics.total_hit_tokens == 640
    found = metrics.as_dict()
    assert found["hit_tokens"] == {"device": 128, "ssd": 512, "total": 640}
    assert found["dropped_blocks"] == {"queue_full": 3, "no_parent": 4, "total": 7}
    assert found["corrupt_blocks"] == {"header": 1, "checksum": 2, "total": 3}


def test_counters_start_at_zero_and_are_plain_json() -> None:
    found = Metrics().as_dict()
    assert json.loads(json.dumps(found)) == found
    totals = [value["total"] for value in found.values() if isinstance(value, dict) and value]
    assert totals == [0, 0, 0]
    assert all(value == 0 for value in found.values() if not isinstance(value, dict))


def test_what_is_returned_is_a_copy() -> None:
    metrics = Metrics()
    before = metrics.as_dict()
    metrics.evicted_blocks["ssd"] += 5
    metrics.hit_tokens["ssd"] += 5
    assert before["evicted_blocks"] == {}
    assert before["hit_tokens"] == {"total": 0}


def test_two_caches_do_not_share_counters() -> None:
    Metrics().hit_tokens["ssd"] += 5
    assert Metrics().total_hit_tokens == 0


def test_many_stores_and_lookups_without_a_hit_raise_the_alarm() -> None:
    assert "without one hit" in silent_hitless().alarms[0]
    assert f"{ALARM_STORED_BLOCKS} blocks" in silent_hitless().alarms[0]
    for name in ("stored_blocks", "block_lookups_without_hit"):
        almost = silent_hitless()
        setattr(almost, name, getattr(almost, name) - 1)
        assert almost.alarms == []


def test_one_hit_in_any_tier_silences_the_alarm() -> None:
    for tier in ("device", "ssd", "remote"):
        metrics = silent_hitless()
        metrics.hit_tokens[tier] += 1
        assert metrics.alarms == []


def test_the_alarm_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = silent_hitless()
    with caplog.at_level(logging.WARNING, "kvstore.store.metrics"):
        Metrics().check_alarms()
        assert caplog.records == []
        for _ in range(5):
            metrics.stored_blocks += 1
            metrics.check_alarms()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "compare the namespaces of writer and reader" in caplog.text
    assert metrics.alarms, "it stays visible in stats"


def test_each_topic_is_said_once_and_topics_do_not_silence_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.WARNING, "kvstore.store.metrics"):
        for _ in range(3):
            metrics.warn_once("header", "block %d is bad", 7)
            metrics.warn_once("io", "cannot read %s", "x")
        Metrics().warn_once("header", "block %d is bad", 8)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["block 7 is bad", "cannot read x", "block 8 is bad"]
