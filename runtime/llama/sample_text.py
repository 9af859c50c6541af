"""The text on which a loaded model is tested: prose, code and a table, some 600 tokens, no passage of it twice."""

from __future__ import annotations

SAMPLE_TEXT = '''\
A chapbook was a small booklet, printed cheaply on one sheet that was folded into eight, twelve or sixteen pages.
Pedlars carried them from village to village, together with ribbons and needles, and sold them for a penny. They held
ballads, almanacs, tales of giants and of robbers, prayers, riddles and advice on how to keep bees. Few of those who
bought them owned another book. The woodcuts were used again and again: the same picture of a ship stood for the Armada
in one and for Noah in the next. Printers set the type in a hurry, and spelled as they pleased.

def total(prices: list[int], *, rebate: float = 0.0) -> float:
    """Return the sum of the prices, less the rebate."""
    return sum(prices) * (1.0 - rebate)

| year | titles | price |
|------|--------|-------|
| 1712 | 31     | 1d    |
| 1740 | 118    | 1d    |

The trade had its own geography. In London the presses stood near the bridge, where the carriers loaded their packs,
and the printers of the north sent for the blocks when the south had worn them out. A pedlar took a few dozen copies
on credit, walked until they were sold, and paid for them when he came back for more. He was often the only man in a
valley who brought news, and what he could not read out of his pages he made up. Children learned their letters from
the stories that he left behind, and kept them until the paper fell apart; that is why so few have come down to us.

When the railways came, the newspapers went with them, and a newspaper cost no more than a ballad. The last of the old
houses sold its blocks for firewood. Collectors had begun to look for the booklets by then, and what had been sold for a
penny went for a pound. Some of the tales were put together again in bound volumes, with the names of scholars on their
backs, and a few of them are still told. The robber is hanged at the end in most of them, and the giant is always slain,
but the riddles have kept their answers to themselves: whoever printed them left the last page out.
'''
