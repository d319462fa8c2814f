"""Training of a small DeepSeek-V4.1-shaped model on real text.

Question: what is the cost of bounded replay in a *trained* model? This trains the models of that measurement,
          of two depths, as the loss of a shortened window grows with every layer above it.
Method:   bytes as tokens, from the Python files of the standard library; one file in 20, chosen by the
          digest of its name, is held out. The forward pass is that of the reference engine: sparse
          attention from the first step, FP4 entries, top-k and candidates, straight-through rounding in
          the backward pass. Indexers learn to predict the attention. Batches depend on seed and step alone,
          so an interrupted training continues exactly.
Bound:    0 bits per byte is perfect, 8 bits is uniform guessing.
Run:      python -m bench.replay.train --depth deep --out models/deep
          Writes ``log.jsonl``, ``loss.svg`` and, every ``--save`` steps, ``state.npz`` (the complete state)
          and ``model.npz`` (float16 tensors by name). Nothing is pickled.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kvstore.output.chart import Axis, Point, Series, chart
from kvstore.output.files import PUBLIC, written
from kvstore.reference.config import ReferenceConfig
from kvstore.reference.engram import TrainedTable, addresses, random_rows, table_path, write_table
from kvstore.reference.model import ReferenceModel
from kvstore.reference.state import Chunk, Floors, SequenceState
from kvstore.reference.weights import Weights, random_weights

HELD_OUT_IN = 20
"""One file in this many is held out."""
INDEXER_SHARE = 0.1
"""Weight of the indexers' loss. Their gradients reach no other parameter, so it only sets their rate."""
BETAS, DECAY, CLIP = (0.9, 0.95), 0.1, 1.0
"""AdamW and the largest gradient norm, as usual for language models of this family."""
HELD_OUT_BATCHES = 4
SMOOTHED_STEPS = 10
"""Steps per point of the curve: a batch of few sequences is noisy."""
TABLE = "table"

SYSTEMS = {
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 48,
    "index_n_heads": 4,
    "index_topk": 32,
    "sliding_window": 32,
    "candidate_topk_blocks": 16,
    "candidate_block_size": 8,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "engram_vocab_size": 2000,
    "engram_n_heads": 2,
    "engram_head_dim": 32,
}
"""At 1,024 tokens 512 and 1,024 entries are visible, 128 of them candidates, 32 chosen; the window is 32."""

DEPTHS = {
    # 6 layers of the encoder: 2, then Full and Reuse twice; 6 of the decoder: Full and two of Reindex.
    "shallow": ReferenceConfig.tiny(
        **SYSTEMS,
        index_source_layer_ids=(2, 4, 6, 8, 10),
        candidate_source_layer_id=6,
        engram_layer_ids=(1,),
    ),
    # 14 layers of the encoder: 2, then Full and three of Reuse thrice; 8 of the decoder.
    "deep": ReferenceConfig.tiny(
        **SYSTEMS,
        num_hidden_layers=22,
        compress_ratios=(0,) * 2 + (2,) * 12 + (1,) * 8,
        kv_source_layer_ids=(2, 6, 10, 14),
        index_source_layer_ids=(2, 6, 10, 14, 16, 18, 20),
        candidate_source_layer_id=14,
        engram_layer_ids=(1, 10),
    ),
}


@dataclass(frozen=True, slots=True)
class Schedule:
    """Training options. All affect the result, so a training continues only with the same options."""

    depth: str
    steps: int
    batch: int
    tokens: int
    rate: float
    seed: int

    def rate_at(self, step: int) -> float:
        """Rise over the first 5 %, then fall along a cosine to a tenth."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.rate * (step + 1) / warm
        done = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


def read_text() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return the bytes to train on and those held out, each file after the other in order of names."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if "site-packages" in name:
            continue
        digest = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        parts[digest % HELD_OUT_IN == 0].append(path.read_bytes())
    trained, held_out = (np.frombuffer(b"".join(part), np.uint8) for part in parts)
    return trained, held_out


def batch_of(
    text: NDArray[np.uint8], schedule: Schedule, stream: int, step: int
) -> NDArray[np.uint32]:
    """Return the sequences of a step, ``[batch, tokens + 1]``: the last token is only predicted."""
    rng = np.random.default_rng([schedule.seed, stream, step])
    starts = rng.integers(0, len(text) - schedule.tokens - 1, schedule.batch)
    tokens: NDArray[np.uint32] = text[starts[:, None] + np.arange(schedule.tokens + 1)].astype("u4")
    return tokens


class Trainee:
    """A model with trainable tensors."""

    def __init__(self, schedule: Schedule) -> None:
        self.config = DEPTHS[schedule.depth]
        weights = random_weights(self.config, schedule.seed, torch.float32)
        self.tensors = weights.tensors()
        tables = {}
        for layer, where in addresses(self.config).items():
            rows = torch.cat(list(random_rows(self.config, where.row_count, schedule.seed + layer)))
            tables[layer] = TrainedTable(rows)
            self.tensors[f"{TABLE}.{layer}"] = rows
        for tensor in self.tensors.values():
            tensor.requires_grad_()
        self.model = ReferenceModel(self.config, weights, tables)
        matrices = [tensor for tensor in self.tensors.values() if tensor.ndim > 1]
        vectors = [tensor for tensor in self.tensors.values() if tensor.ndim == 1]
        groups = [
            {"params": matrices, "weight_decay": DECAY},
            {"params": vectors, "weight_decay": 0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=schedule.rate, betas=BETAS)

    def loss(self, sequences: NDArray[np.uint32], lessons: list[Tensor] | None) -> Tensor:
        """Return the loss of the next token in nats, mean over all. Shapes: ``[batch, tokens + 1]``."""
        layout, chunks = self.config.layout(torch.float32), []
        for tokens in sequences[:, :-1]:
            state = SequenceState(
                self.config,
                layout,
                tokens,
                floors=Floors.replay(0, self.config.sliding_window),
                # A prompt no longer than the window: the decoder runs every row, from the first on.
                prompt=1,
                dtype=torch.float32,
            )
            chunks.append(Chunk(state, 0, len(tokens)))
        decoded = self.model.decode(self.model.encode(chunks, lessons), chunks, lessons)
        targets = torch.from_numpy(sequences[:, 1:].astype(np.int64)).flatten()
        return functional.cross_entropy(self.model.logits(decoded), targets)

    def learn(self, sequences: NDArray[np.uint32], rate: float) -> tuple[float, float]:
        """Take one step; return the loss and the indexers', in nats."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        lessons: list[Tensor] = []
        loss = self.loss(sequences, lessons)
        indexers = torch.stack(lessons).mean()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss + INDEXER_SHARE * indexers)
        torch.nn.utils.clip_grad_norm_(self.tensors.values(), CLIP)
        self.optimizer.step()
        return loss.item(), indexers.item()

    def save_state(self, path: Path, step: int, schedule: Schedule) -> None:
        """Write the complete state."""
        arrays = {"schedule": np.array(json.dumps(asdict(schedule))), "step": np.array(step)}
        for name, tensor in self.tensors.items():
            arrays[name] = tensor.detach().numpy()
            for part, value in self.optimizer.state.get(tensor, {}).items():
                arrays[f"{part}:{name}"] = value.numpy()
        write_arrays(path, arrays)

    def load_state(self, path: Path, schedule: Schedule) -> int:
        """Restore a state; return the next step. Raises ``ValueError`` for another schedule."""
        with np.load(path, allow_pickle=False) as stored:
            found = json.loads(str(stored["schedule"]))
            if found != asdict(schedule):
                msg = f"{path} belongs to {found}, expected {asdict(schedule)}; use another --out"
                raise ValueError(msg)
            with torch.no_grad():
                for name, tensor in self.tensors.items():
                    tensor.copy_(torch.from_numpy(stored[name]))
                    parts = ("step", "exp_avg", "exp_avg_sq")
                    if f"step:{name}" in stored:
                        self.optimizer.state[tensor] = {
                            part: torch.from_numpy(stored[f"{part}:{name}"]) for part in parts
                        }
            return int(stored["step"])

    def save_model(self, path: Path, schedule: Schedule, step: int) -> None:
        """Write the tensors as float16, with the config and the training options."""
        facts = {"config": asdict(self.config), "schedule": asdict(schedule), "step": step}
        arrays = {"facts": np.array(json.dumps(facts))}
        for name, tensor in self.tensors.items():
            arrays[name] = tensor.detach().numpy().astype(np.float16)
        write_arrays(path, arrays)


def load_model(path: Path, tables: Path, dtype: torch.dtype) -> tuple[ReferenceConfig, Weights]:
    """Return the model that ``save_model`` wrote, for an engine of seed 0; its tables are in that folder.

    The numbers that were trained were not rounded to float16; a config names all else.
    """
    with np.load(path, allow_pickle=False) as stored:
        facts = json.loads(str(stored["facts"]))["config"]
        lists = {name: tuple(value) for name, value in facts.items() if isinstance(value, list)}
        config = ReferenceConfig(**{**facts, **lists})
        shapes = random_weights(config, 0, dtype)
        found = {name: torch.from_numpy(stored[name]).to(dtype) for name in shapes.tensors()}
        tables.mkdir(parents=True, exist_ok=True)
        for layer in config.engram_layer_ids:
            rows = torch.from_numpy(stored[f"{TABLE}.{layer}"]).to(torch.float32)
            write_table(table_path(tables, config, layer, 0), [rows])
    return config, shapes.replaced(found)


def write_arrays(path: Path, arrays: dict[str, NDArray[np.generic]]) -> None:
    """Write arrays by name, atomically."""
    with written(path, PUBLIC) as file:
        np.savez(file, allow_pickle=False, **arrays)


def held_out_bits(trainee: Trainee, text: NDArray[np.uint8], schedule: Schedule) -> float:
    """Return bits per byte of held-out text, over fixed batches."""
    with torch.no_grad():
        losses = [
            float(trainee.loss(batch_of(text, schedule, 1, number), None))
            for number in range(HELD_OUT_BATCHES)
        ]
    return sum(losses) / len(losses) / math.log(2)


def draw(log: list[dict[str, float]]) -> str:
    """Return the loss curve as SVG."""
    whole = [log[at : at + SMOOTHED_STEPS] for at in range(0, len(log), SMOOTHED_STEPS)]
    trained = [(rows[-1]["step"], sum(row["bits"] for row in rows) / len(rows)) for rows in whole]
    held_out = [(row["step"], row["held_out_bits"]) for row in log if "held_out_bits" in row]
    series = [
        Series(
            name,
            tuple(Point(step, bits, bits, bits) for step, bits in points),
            is_line=True,
            has_dots=name == "held out",
        )
        for name, points in (
            (f"trained on, mean of {SMOOTHED_STEPS} steps", trained),
            ("held out", held_out),
        )
    ]
    return chart(
        [each for each in series if each.points],
        title="Loss of the reference model",
        x=Axis("step"),
        y=Axis("bits per byte"),
    )


def train(schedule: Schedule, out: Path, save: int, stop: int) -> None:
    """Train up to step ``stop``, from the end of the last training."""
    out.mkdir(parents=True, exist_ok=True)
    trained, held_out = read_text()
    trainee, step = Trainee(schedule), 0
    log_path, state_path = out / "log.jsonl", out / "state.npz"
    log: list[dict[str, float]] = []
    if state_path.exists():
        step = trainee.load_state(state_path, schedule)
        # Steps after the last save are repeated.
        log = [json.loads(line) for line in log_path.read_text().splitlines()]
        log = [row for row in log if row["step"] <= step]
    numbers = sum(tensor.numel() for tensor in trainee.tensors.values())
    print(f"{schedule} {numbers:,} numbers, {len(trained):,} + {len(held_out):,} bytes", flush=True)
    while step < stop:
        began = time.perf_counter()
        loss, indexers = trainee.learn(batch_of(trained, schedule, 0, step), schedule.rate_at(step))
        seconds = time.perf_counter() - began
        step += 1
        row = {"step": step, "bits": loss / math.log(2), "indexer_nats": indexers}
        if step % save == 0 or step == stop:
            row["held_out_bits"] = held_out_bits(trainee, held_out, schedule)
        log.append({name: round(value, 5) for name, value in row.items()})
        left = (stop - step) * seconds / 60
        text = "  ".join(f"{name} {value:.3f}" for name, value in row.items() if name != "step")
        print(f"{step:6}/{stop}  {text}  {seconds:.1f} s, {left:.0f} min left", flush=True)
        if step % save == 0 or step == stop:
            trainee.save_state(state_path, step, schedule)
            trainee.save_model(out / "model.npz", schedule, step)
            log_path.write_text("".join(json.dumps(row) + "\n" for row in log))
            (out / "loss.svg").write_text(draw(log))


def main() -> None:
    """Train one depth."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--depth", choices=DEPTHS, default="shallow")
    parser.add_argument("--steps", type=int, default=1600, help="length of the whole schedule")
    parser.add_argument("--stop", type=int, help="step to stop at; the schedule stays the same")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=int, default=100)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    schedule = Schedule(
        options.depth, options.steps, options.batch, options.tokens, options.rate, options.seed
    )
    train(schedule, options.out, options.save, min(options.stop or options.steps, options.steps))


if __name__ == "__main__":
    main()
