"""A cache against a dict: no wrong byte, no lost block, no leaked pin, whatever the order of calls.

The model and what it checks are tests/torture/model.py, which also drives it for a million operations.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.stores import BLOCK
from tests.torture.model import CacheModel, Prompt

PROMPTS = st.builds(
    Prompt,
    walk=st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple),
    tail=st.integers(0, BLOCK - 1),
    image=st.integers(0, 2),
    tenant=st.integers(0, 1),
)
CHOICES = st.integers(0, 1 << 16)
TENANTS = st.integers(0, 1)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.model = CacheModel(Path(tempfile.mkdtemp()))

    def teardown(self) -> None:
        self.model.end()

    @rule(prompt=PROMPTS, ttl=st.sampled_from([None, None, 10.0, 1000.0]), pin=st.booleans())
    def store(self, prompt: Prompt, ttl: float | None, pin: bool) -> None:
        self.model.store(prompt, ttl=ttl, pin=pin)

    @rule(prompt=PROMPTS, skipped=st.integers(1, 8))
    def store_the_rest(self, prompt: Prompt, skipped: int) -> None:
        self.model.store(prompt, skipped=skipped)

    @rule(prompt=PROMPTS)
    def store_with_a_full_queue(self, prompt: Prompt) -> None:
        self.model.store(prompt, is_full=True)

    @rule(prompt=PROMPTS)
    def store_and_find(self, prompt: Prompt) -> None:
        self.model.store_and_find(prompt)

    @rule(prompt=PROMPTS, request_id=st.sampled_from([None, "a", "b"]))
    def read(self, prompt: Prompt, request_id: str | None) -> None:
        self.model.read(prompt, request_id)

    @rule(prompt=PROMPTS)
    def probe(self, prompt: Prompt) -> None:
        self.model.probe(prompt)

    @rule(prompt=PROMPTS)
    def look_and_forget(self, prompt: Prompt) -> None:
        self.model.forget(prompt)

    @rule(prompt=PROMPTS, load=st.booleans())
    def hold(self, prompt: Prompt, load: bool) -> None:
        self.model.hold(prompt, load=load)

    @rule()
    def let_go(self) -> None:
        self.model.let_go()

    @rule(prompt=PROMPTS, choice=CHOICES)
    def put_window(self, prompt: Prompt, choice: int) -> None:
        self.model.put_window(prompt, choice)

    @rule(prompt=PROMPTS)
    def window(self, prompt: Prompt) -> None:
        self.model.window(prompt)

    @rule(seconds=st.sampled_from([1.0, 29.0, 31.0, 400.0, 1e9]))
    def wait(self, seconds: float) -> None:
        self.model.wait(seconds)

    @rule()
    def flush(self) -> None:
        self.model.flush()

    @rule()
    def reopen(self) -> None:
        self.model.reopen()

    @rule(tenant=TENANTS)
    def clear(self, tenant: int) -> None:
        self.model.clear(tenant)

    @rule(tenant=TENANTS)
    def bump_generation(self, tenant: int) -> None:
        self.model.bump_generation(tenant)

    @rule(count=st.integers(1, 4), sort=st.integers(0, 2))
    def fail_writes(self, count: int, sort: int) -> None:
        self.model.fail_writes(count, sort)

    @rule(prompt=PROMPTS, choice=CHOICES, lose=st.booleans())
    def damage(self, prompt: Prompt, choice: int, lose: bool) -> None:
        self.model.damage(prompt, choice, lose=lose)

    @invariant()
    def accounts_agree(self) -> None:
        self.model.check_accounts()


CacheMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, derandomize=True
)
TestCacheAgainstADict = CacheMachine.TestCase
