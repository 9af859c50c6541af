import pytest

from chapbook.runtime.gguf import read_gguf
from chapbook.runtime.llama.options import choose_flash_attention
from chapbook.runtime.llama.placement import LEAST_CONTEXT_TOKENS, place

# 2 layers x 2 KV heads x (16 + 16) elements x 2 bytes.
KV_BYTES = 256


@pytest.fixture
def placed(tiny):
    metadata = read_gguf(tiny("llama"))

    def choose(free_bytes, **options):
        return place(
            metadata, **({"asked_n_ctx": None, "free_bytes": free_bytes, "n_ubatch": 512, "n_outputs": 64} | options)
        )

    return choose


def test_the_trained_context_is_taken_where_it_fits(placed):
    placement = placed(100 << 20)
    assert (placement.n_ctx, placement.n_ctx_trained) == (32768, 32768)
    assert placement.n_cells == 40960
    assert placement.kv_bytes == 40960 * KV_BYTES


def test_the_window_is_lowered_until_everything_fits_in_four_fifths(placed):
    placement = placed(10 << 20)
    assert LEAST_CONTEXT_TOKENS < placement.n_ctx < 32768
    assert placement.n_ctx % 256 == 0
    used = placement.weights_bytes + placement.compute_bytes
    assert used + placement.kv_bytes <= 0.8 * (10 << 20) < used + placement.kv_bytes + 256 * KV_BYTES
    assert "32,768" in placement.reason
    assert "lowered" in placement.describe()


def test_the_window_is_not_lowered_below_what_is_of_use(placed):
    assert placed(1000).n_ctx == LEAST_CONTEXT_TOKENS


def test_a_window_that_was_asked_for_is_taken(placed):
    placement = placed(1000, asked_n_ctx=5000)
    assert (placement.n_ctx, placement.reason) == (5000, "as asked")


def test_a_smaller_cache_type_gives_a_larger_window(placed):
    assert placed(8 << 20, type_k="q8_0", type_v="q8_0").n_ctx > placed(8 << 20).n_ctx
    assert placed(8 << 20, type_k="q8_0").n_ctx == placed(8 << 20).n_ctx


def test_plain_attention_is_taken_on_a_processor_where_its_scores_have_room(tiny):
    metadata = read_gguf(tiny("llama"))
    heads = metadata.number("llama.attention.head_count")
    scores = 4 * 512 * 40960 * heads
    fits = {"offloads": False, "type_v": "f16", "n_cells": 40960, "n_ubatch": 512, "free_bytes": 10 * scores}
    assert choose_flash_attention(metadata, **fits) is False
    for change in ({"offloads": True}, {"type_v": "q8_0"}, {"free_bytes": 10 * scores - 10}):
        assert choose_flash_attention(metadata, **(fits | change)) is None
