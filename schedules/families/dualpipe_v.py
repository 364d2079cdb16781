"""DualPipeV: a V of two stages per rank, where forward and backward passes overlap in pairs.

DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437. DualPipe holds the model twice, once
for each direction. Sea AI Lab cut it in half: rank r holds stage r and stage 2S - 1 - r, as in
`zb_v`, and every weight exists once. The DualPipe repository defines the phases. F&B is the
duration of a pair; all durations are for one stage, which has half of a rank's layers.

    idle on the critical rank   (S - 1)(2 F&B - B - 2W) + F + B - F&B where a pair takes F&B,
                                (S - 1)(F + I - W) where its halves run one after the other;
                                provided that W <= I <= F <= B and S > 1
    peak activations            2S + 1, a stage's inputs each

At F = I = W and F&B = F + B the first is (S - 1)(F&B + B - 3W), the formula of the repository.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from schedules.core.action import Action, Kind
from schedules.core.schedule import Schedule
from schedules.families.constructions.sizes import need_microbatches, need_stages_per_rank


def dualpipe_v(num_ranks: int, num_microbatches: int, num_stages: int) -> Schedule:
    need_stages_per_rank("dualpipe_v", 2, num_ranks, num_stages)
    need_microbatches("dualpipe_v", num_stages, num_microbatches, "2 * num_ranks")
    orders, pairs = [], []
    for rank in range(num_ranks):
        order: list[Action] = []
        positions = []
        for cell in _cells(rank, num_ranks, num_microbatches):
            if len(cell) == 2:
                positions.append(len(order))
            order += cell
        orders.append(tuple(order))
        pairs.append(tuple(positions))
    placement = (*range(num_ranks), *reversed(range(num_ranks)))
    return Schedule("dualpipe_v", num_microbatches, tuple(orders), placement, tuple(pairs))


class _Rank:
    """A counter of a rank's microbatches; chunks 0 and 1 are its stages there and back."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.stages = rank, 2 * num_ranks - 1 - rank
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.weights: deque[Action] = deque()

    def forward(self, chunk: int) -> Action:
        self.forwards[chunk] += 1
        return Action(self.stages[chunk], "F", self.forwards[chunk] - 1)

    def backward(self, chunk: int, kind: Kind = "B") -> Action:
        """Return the next backward of a chunk; after an ``I``, its ``W`` remains to be run."""
        action = Action(self.stages[chunk], kind, self.backwards[chunk])
        self.backwards[chunk] += 1
        if kind == "I":
            self.weights.append(action._replace(kind="W"))
        return action

    def weight(self) -> Action:
        return self.weights.popleft()


def _cells(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[Action, ...]]:
    """Yield the eight phases of one rank: actions, and pairs of actions."""
    r = _Rank(rank, num_ranks)
    above = num_ranks - 1 - rank
    for _ in range(2 * above):
        yield (r.forward(0),)
    for _ in range(rank + 1):
        yield (r.forward(0),)
        yield (r.forward(1),)
    for _ in range(above):
        yield (r.backward(1, "I"),)
        yield (r.weight(),)
        yield (r.forward(1),)
    for n in range(num_microbatches - 2 * num_ranks + rank + 1):
        pair = r.forward(0), r.backward(1)
        # On the last rank the first backward would wait for the forward of its own pair.
        yield from zip(pair) if n == 0 and above == 0 else [pair]
        yield r.forward(1), r.backward(0)
    for _ in range(above):
        yield (r.backward(1),)
        yield r.forward(1), r.backward(0)
    # Half of the remaining backwards are split, so that W fills the drain.
    full = rank + 1
    for n in range(2 * (rank + 1)):
        yield (r.backward(1 - n % 2, "B" if n < full else "I"),)
    for _ in range(above):
        yield (r.weight(),)
        yield (r.backward(0, "I"),)
    while r.weights:
        yield (r.weight(),)
