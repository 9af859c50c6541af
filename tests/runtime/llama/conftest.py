import itertools

import numpy as np
import pytest

from chapbook.kernels.tokens import concat_tokens, token_ids
from chapbook.runtime.engine import Sampling
from chapbook.runtime.llama import LlamaEngine

GREEDY = Sampling(temperature=0.0)


@pytest.fixture
def open_engine(tiny):
    """Return a function (kind or path, **options of `LlamaEngine.open`) -> an engine that is closed with the test."""
    opened = []

    def open_one(model, *, model_options=None, **options):
        path = tiny(model, **(model_options or {})) if isinstance(model, str) else model
        engine = LlamaEngine.open(path, **({"n_ctx": 2048, "n_threads": 1} | options))
        opened.append(engine)
        return engine

    yield open_one
    for engine in opened:
        engine.close()


@pytest.fixture
def random_run():
    """Return a function (n, seed) -> n random tokens of the tiny models' byte vocabulary, none of them special."""
    return lambda n, seed=0: token_ids(np.random.default_rng(seed).integers(0, 256, size=n))


@pytest.fixture
def next_logits():
    """Return a function (engine, sequence) -> the logits after what is resident, shape (vocab_size,)."""
    return lambda engine, sequence: engine.context.logits(engine.residency.state(sequence)).copy()


@pytest.fixture
def reply():
    """Return a function that generates to the end and checks the account: resident is what was synced and the reply."""

    def generate(engine, sequence, *, sampling=GREEDY, max_tokens=20, take=None, **options):
        synced = engine.resident(sequence)
        generation = engine.generate(sequence, sampling=sampling, max_tokens=max_tokens, **options)
        pieces = [token.piece for token in itertools.islice(generation, take)]
        generation.close()
        resident = engine.resident(sequence)
        assert np.array_equal(resident, concat_tokens([synced, generation.report.tokens]))
        engine.check_integrity()
        return generation.report, b"".join(pieces)

    return generate
