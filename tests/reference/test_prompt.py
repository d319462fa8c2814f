"""The reasoning effort comes first, so it decides the shared prefix of two prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvstore
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.prompt import PromptEncoder
from tests.reference.support import engine_of

SMALL = ReferenceConfig.tiny(sliding_window=16, index_topk=8)
TEXT = "A question that is long enough to fill several blocks of thirty-two tokens each." * 2


def test_an_effort_is_text_in_front_of_the_prompt() -> None:
    encoder = PromptEncoder()

    assert bytes(encoder.encode("x", "low").astype("u1")) == b"<effort 50>\nx"
    assert encoder.encode("x", "max").tolist() == encoder.encode("x", 100).tolist()
    for effort in ("lowest", 0, 101):
        with pytest.raises(ValueError, match="effort"):
            encoder.encode("x", effort)


def test_efforts_share_no_prefix_and_encoder_versions_share_nothing(tmp_path: Path) -> None:
    encoder = PromptEncoder()
    first_day = PromptEncoder(version="1", efforts={"low": 25, "high": 50, "max": 75})
    renamed = PromptEncoder(efforts={**encoder.efforts, "max": 99})
    assert len({each.identity for each in (encoder, first_day, renamed)}) == 3
    engines = [engine_of(SMALL, tokenizer=each.identity) for each in (encoder, first_day, renamed)]
    with kvstore.PrefixCache.open(
        tmp_path,
        layout=SMALL.layout(),
        namespace=engines[0].namespace,
        block_tokens=32,
        ssd_bytes="64MiB",
        device_bytes=0,
    ) as cache:
        for engine in engines:
            engine.cache = cache.scope(engine.namespace)
        low = encoder.encode(TEXT, "low")
        engines[0].prefill(low)
        cache.flush()
        hits = {
            "same": engines[0].prefill(low).hit_tokens,
            "other effort": engines[0].prefill(encoder.encode(TEXT, "high")).hit_tokens,
            "other version": engines[1].prefill(low).hit_tokens,
            "other names": engines[2].prefill(low).hit_tokens,
        }

    # The tokens alone do not tell the versions apart: "high" was rendered as "low" is now.
    assert low.tolist() == first_day.encode(TEXT, "high").tolist()
    assert hits == {
        "same": 160,
        "other effort": 0,
        "other version": 0,
        "other names": 0,
    }
