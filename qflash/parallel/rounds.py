"""Which hops of a ring one call of attention takes together.

Keys of several hops that the same queries see whole are laid end to end, which costs less than to merge a result for
each hop: results have more heads, and are merged in float32. Such a call waits for all of its hops, and what hides
these is what was begun before it. So a round has no more hops than came before it: where a hop takes no more than half
the time of the call on its keys, nothing is waited for.
"""

from __future__ import annotations

from qflash.parallel.parts import Part
from qflash.parallel.pieces import OPEN

# Of one round, where it has several hops. Their keys, end to end, are memory beside the blocks.
MOST_HOPS, MOST_KEYS = 4, 32768

Hops = list[list[Part]]  # what a rank computes after each of some hops


def rounds_of(steps: Hops) -> list[Hops]:
    """The hops, those together that one call takes."""
    rounds: list[Hops] = []
    for hop, parts in enumerate(steps):
        if rounds and _is_one_call([*rounds[-1], parts], before=hop - len(rounds[-1])):
            rounds[-1].append(parts)
        else:
            rounds.append([parts])
    return rounds


def _is_one_call(hops: Hops, before: int) -> bool:
    if len(hops) > min(before, MOST_HOPS) or not all(len(parts) == 1 and _is_plain(parts[0]) for parts in hops):
        return False
    ((first,), *_) = hops
    return all(part.q == first.q for (part,) in hops) and sum(part.k[1] - part.k[0] for (part,) in hops) <= MOST_KEYS


def _is_plain(part: Part) -> bool:
    """Whether each of its queries sees each of its keys."""
    return part.window == OPEN and not part.sinks and part.kv_lens is None and part.offsets is None
