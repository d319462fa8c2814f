"""Runs an engine in a process of its own, so that it has workers, and can be killed.

``python -m tests.engine.vllm.serve MODEL STORE OPTIONS PROMPTS`` with JSON options and a JSON list of
``[length, seed]``; answers one JSON line per prompt. The store ``-`` is none.
"""

from __future__ import annotations

import json
import sys

from tests.engine.vllm.engine import ask, engine, prompt


def main(model: str, store: str, options: str, prompts: str) -> None:
    with engine(model, None if store == "-" else store, **json.loads(options)) as llm:
        for length, seed in json.loads(prompts):
            [(tokens, cached)] = ask(llm, [prompt(length, seed)])
            sys.stdout.write(json.dumps([list(tokens), cached]) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
