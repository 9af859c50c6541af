"""Budgets derive from the real window, whatever its size."""

from hypothesis import given
from hypothesis import strategies as st

from chapbook.compaction.budget import LARGEST_WINDOW_TOKENS, MINIMUM_ROOM_TOKENS, Budgets

windows = st.integers(min_value=256, max_value=LARGEST_WINDOW_TOKENS)
prefixes = st.integers(min_value=0, max_value=4000)


@given(n_ctx=windows, prefix=prefixes)
def test_prefix_room_and_reserve_fill_the_window_exactly(n_ctx: int, prefix: int) -> None:
    budgets = Budgets(n_ctx=n_ctx, prefix_tokens=prefix)
    assert budgets.prefix_tokens + budgets.room_tokens + budgets.reply_reserve_tokens == n_ctx
    assert 0 < budgets.reply_reserve_tokens <= n_ctx // 8 or n_ctx < 8


@given(prefix=prefixes)
def test_smallest_window_is_the_first_that_leaves_the_least_room(prefix: int) -> None:
    smallest = Budgets(n_ctx=1, prefix_tokens=prefix).smallest_window_tokens
    assert Budgets(n_ctx=smallest, prefix_tokens=prefix).room_tokens >= MINIMUM_ROOM_TOKENS
    assert Budgets(n_ctx=smallest - 1, prefix_tokens=prefix).room_tokens < MINIMUM_ROOM_TOKENS


def test_arrival_threshold_follows_the_window_between_its_clamps() -> None:
    assert Budgets(n_ctx=2048, prefix_tokens=0).arrival_tokens == 512
    assert Budgets(n_ctx=32768, prefix_tokens=0).arrival_tokens == (32768 - 4096) // 6
    assert Budgets(n_ctx=262_144, prefix_tokens=0).arrival_tokens == 8000
    assert Budgets(n_ctx=32768, prefix_tokens=0, arrival_override=700).arrival_tokens == 700


@given(n_ctx=windows, used=st.integers(min_value=0, max_value=LARGEST_WINDOW_TOKENS))
def test_what_is_left_never_touches_the_reply_reserve(n_ctx: int, used: int) -> None:
    budgets = Budgets(n_ctx=n_ctx, prefix_tokens=0)
    assert used + budgets.left_tokens(used) + budgets.reply_reserve_tokens == n_ctx
