"""A Ctrl-C may break into any change of the accounts: they are true again afterwards, and the logits right."""

import sys
from pathlib import Path

import numpy as np
import pytest

import chapbook.runtime.llama
from chapbook.kernels.tokens import concat_tokens
from chapbook.runtime.engine import SyncPoints
from chapbook.runtime.prefix_cache.options import CacheOptions

KINDS = ("llama", "gemma3", "mamba", "hybrid")
FOLDERS = tuple(
    str(folder) for name in ("llama", "prefix_cache")
    for folder in [Path(chapbook.runtime.llama.__file__).parent.parent / name]
)  # fmt: skip
POINTS = SyncPoints(pinned=(100,), ring=(200, 300))


class Interrupter:
    """Raises KeyboardInterrupt at the n-th line that is run in the engine's own modules."""

    def __init__(self, at):
        self.left, self.struck = at, False

    def __call__(self, frame, event, _argument):
        code = frame.f_code
        # ctypes swallows one within llama.cpp's log callback. In the line of a `with` a tracer may raise before the
        # lock is given back, where the interpreter does not look for signals.
        elsewhere = not code.co_filename.startswith(FOLDERS) or code.co_filename.endswith("turns.py")
        if self.struck or elsewhere or code.co_name == "receive":
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                self.struck = True
                raise KeyboardInterrupt
        return self


def interrupted(action, at):
    """Run an action, broken off at its n-th line; say whether it came to that line."""
    interrupter = Interrupter(at)
    sys.settrace(interrupter)
    try:
        action()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return interrupter.struck


def story(engine, random_run):
    """Return what is done one after another: everything that moves runs between sequences, slots and snapshots."""
    prefix = random_run(100)
    first, second = engine.open_sequence(), engine.open_sequence()
    one = concat_tokens([prefix, random_run(300, seed=1)])
    two = concat_tokens([prefix, random_run(250, seed=2)])
    wanted = [
        (first, one), (second, two), (first, concat_tokens([one[:200], random_run(60, seed=3)])),
        (second, concat_tokens([one, random_run(9, seed=4)])), (first, concat_tokens([two, random_run(5, seed=5)])),
    ]  # fmt: skip
    third = engine.open_sequence()
    return [*wanted, (third, concat_tokens([prefix, random_run(30, seed=6)])), (second, one)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_at_any_line_leaves_accounts_that_are_true_at_the_next_sync(
    open_engine, random_run, next_logits, kind
):
    options = {"n_ctx": 1024, "n_batch": 64, "n_ubatch": 64}
    reference = open_engine(kind, n_sequences=1, **options)
    expected = []
    for _, wanted in story(reference, random_run):
        sequence = reference.open_sequence()
        reference.sync(sequence, wanted, reuse=False)
        expected.append(next_logits(reference, sequence))
        reference.drop(sequence)
    engine = open_engine(kind, n_sequences=2, cache=CacheOptions(memory_mb=50), **options)
    struck = 0
    # A sync runs some hundred lines, one that moves states a thousand.
    for at in np.random.default_rng(0).integers(1, 900, size=12).tolist():
        steps = story(engine, random_run)
        for (sequence, wanted), logits in zip(steps, expected, strict=True):
            struck += interrupted(lambda s=sequence, w=wanted: engine.sync(s, w, points=POINTS), at)
            engine.sync(sequence, wanted, points=POINTS)
            engine.check_integrity()
            np.testing.assert_allclose(next_logits(engine, sequence), logits, atol=0.05)
        for sequence in {sequence for sequence, _ in steps}:
            struck += interrupted(lambda s=sequence: engine.drop(s), at % 40 + 1)
            engine.drop(sequence)
    assert struck >= 40
