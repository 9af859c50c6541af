import numpy as np
import pytest

from chapbook.kernels.tokens import NO_TOKENS, token_ids
from chapbook.runtime.engine import Sampling
from chapbook.runtime.llama.sampler import Sampler

VOCAB = 50
LOGITS = np.linspace(5.0, 0.0, VOCAB, dtype=np.float32)


def sampler(history=NO_TOKENS, **options):
    return Sampler(Sampling(**options), vocab_size=VOCAB, history=history)


def test_temperature_zero_takes_the_likeliest():
    assert sampler(temperature=0.0).pick(LOGITS) == 0
    assert sampler(temperature=0.0).pick(LOGITS, among=np.array([7, 3, 9], dtype=np.int32)) == 3


def test_a_seed_repeats_the_draws():
    def draws(seed):
        chain = sampler(temperature=5.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
        return [chain.pick(LOGITS) for _ in range(20)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)
    assert len(set(draws(3))) > 3


@pytest.mark.parametrize(
    ("options", "most"), [({"top_k": 2}, 1), ({"top_k": 0, "top_p": 0.05}, 0), ({"top_k": 0, "min_p": 0.99}, 0)]
)
def test_each_setting_narrows_the_choice(options, most):
    chain = sampler(temperature=50.0, **({"top_p": 1.0, "min_p": 0.0, "seed": 1} | options))
    assert {chain.pick(LOGITS) for _ in range(60)} == set(range(most + 1))


def test_a_repeat_penalty_looks_back_on_so_many_tokens():
    history = token_ids([0, 1, 2])
    options = {"temperature": 0.0, "repeat_penalty": 100.0}
    assert sampler(history, **options).pick(LOGITS) == 3
    assert sampler(history, repeat_last_n=2, **options).pick(LOGITS) == 0
    assert sampler(history, repeat_last_n=0, **options).pick(LOGITS) == 0


def test_only_what_is_accepted_is_penalised_and_what_is_taken_back_is_not():
    chain = sampler(temperature=0.0, repeat_penalty=100.0)
    assert [chain.pick(LOGITS) for _ in range(3)] == [0, 0, 0]
    chain.accept(0)
    chain.accept(1)
    assert chain.pick(LOGITS) == 2
    # Token 1 was replaced by another one, so that the reply holds 0 alone.
    chain.take_back(token_ids([0]))
    assert chain.pick(LOGITS) == 1
