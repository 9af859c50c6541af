"""How a window's tokens are shared out. Every number derives from the engine's real `n_ctx`.

n_ctx ─┬─ reply reserve   min(4096, n_ctx // 8)
       └─ usable ─┬─ session prefix
                  └─ room: what the conversation may fill
"""

from __future__ import annotations

import msgspec

MINIMUM_ROOM_TOKENS = 1024
LARGEST_WINDOW_TOKENS = 262_144


class Budgets(msgspec.Struct, frozen=True, kw_only=True):
    """The budgets of one session. `arrival_override` replaces the derived arrival threshold where config sets it."""

    n_ctx: int
    prefix_tokens: int
    arrival_override: int | None = None

    @property
    def reply_reserve_tokens(self) -> int:
        """What is kept free for the reply."""
        return min(4096, self.n_ctx // 8)

    @property
    def usable_tokens(self) -> int:
        """What a request may fill."""
        return self.n_ctx - self.reply_reserve_tokens

    @property
    def room_tokens(self) -> int:
        """What the conversation may fill; negative where the prefix alone overruns the window."""
        return self.usable_tokens - self.prefix_tokens

    @property
    def arrival_tokens(self) -> int:
        """Over this a result is stubbed."""
        if self.arrival_override is not None:
            return self.arrival_override
        return max(512, min(self.usable_tokens // 6, 8000))

    @property
    def mention_tokens(self) -> int:
        """Over this a file that a person attached is stubbed."""
        return max(self.arrival_tokens, self.usable_tokens // 3)

    @property
    def smallest_window_tokens(self) -> int:
        """The least `n_ctx` with which this prefix leaves `MINIMUM_ROOM_TOKENS`.

        n - n // 8 = ceil(7n / 8) >= needed holds for n > 8 (needed - 1) / 7, while the reserve is below its cap of
        4096; above that n = needed + 4096 is enough.
        """
        needed = self.prefix_tokens + MINIMUM_ROOM_TOKENS
        return min(8 * (needed - 1) // 7 + 1, needed + 4096)

    def left_tokens(self, window_tokens: int) -> int:
        """What may still be added to a window of `window_tokens` before the reply reserve is touched."""
        return self.usable_tokens - window_tokens
