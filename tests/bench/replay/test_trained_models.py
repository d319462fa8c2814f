"""The models that are kept with the project: they load without pickle and know something of their text."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from bench.replay.train import DEPTHS, load_model, read_text
from kvstore.reference.engine import ReferenceEngine
from kvstore.reference.state import Chunk, Floors, SequenceState

MODELS = Path(__file__).parents[3] / "bench/data/reference"
TOKENS = 160


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_kept_model_predicts_text_that_it_never_saw(depth: str, tmp_path: Path) -> None:
    """Better than knowing how often each byte comes, and as its log says, but for a short context."""
    torch.set_num_threads(1)
    config, weights = load_model(MODELS / depth / "model.npz", tmp_path, torch.float32)
    engine = ReferenceEngine(config, weights=weights, dtype=torch.float32, tables=tmp_path)
    _, held_out = read_text()
    losses = []
    for number in range(4):
        start = (2 * number + 1) * len(held_out) // 8
        tokens = held_out[start : start + TOKENS + 1].astype(np.uint32)
        state = SequenceState(
            config,
            engine.layout,
            tokens[:-1],
            floors=Floors.replay(0, 1),
            prompt=1,
            dtype=torch.float32,
        )
        chunks = [Chunk(state, 0, TOKENS)]
        with torch.inference_mode():
            logits = engine.model.logits(engine.model.decode(engine.model.encode(chunks), chunks))
        targets = torch.from_numpy(tokens[1:].astype(np.int64))
        losses.append(float(torch.nn.functional.cross_entropy(logits, targets)) / math.log(2))
    shares = np.bincount(held_out) / len(held_out)
    by_count = -float((shares[shares > 0] * np.log2(shares[shares > 0])).sum())

    assert config == DEPTHS[depth]
    assert sum(losses) / len(losses) < 0.7 * by_count


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_kept_model_says_how_it_came_to_be(depth: str) -> None:
    log = [json.loads(line) for line in (MODELS / depth / "log.jsonl").read_text().splitlines()]
    with np.load(MODELS / depth / "model.npz", allow_pickle=False) as stored:
        facts = json.loads(str(stored["facts"]))

    assert facts["schedule"]["depth"] == depth
    assert facts["step"] == facts["schedule"]["steps"] == log[-1]["step"] == len(log)
    # The whole schedule was run, and it learnt to the end.
    held_out = [row["held_out_bits"] for row in log if "held_out_bits" in row]
    assert held_out[-1] == min(held_out)
