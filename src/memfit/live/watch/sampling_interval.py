"""At how many steps a look is taken: at every one, unless steps are so short that looks would take more than 1 % of them."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from statistics import median

SHARE = 0.01  # of the steps' time that looks may take
FULL = 128  # looks at every step that a run begins with
RECENT = 16  # looks that the two times are the median of
MOST = 1000  # steps without a look
LONGEST = 1.0  # seconds without a look, where steps have become longer


class Pace:
    """Ask `due` at the end of every step; where it is, say `looked` when the look is over."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock, self.every = clock, 1
        self._steps = self._looks = 0
        self._start = self._end = clock()
        self._costs: deque[float] = deque(maxlen=RECENT)
        self._gaps: deque[float] = deque(maxlen=RECENT)  # of one step, without looks

    def due(self, always: bool = False) -> bool:
        """Is a look taken after this step?"""
        self._steps += 1
        if self._steps < self.every and not always and self.clock() - self._end < LONGEST:
            return False
        self._start = self.clock()
        return True

    def looked(self) -> None:
        """The look that was due is over."""
        self._gaps.append((self._start - self._end) / self._steps)
        self._end, self._steps = self.clock(), 0
        self._costs.append(self._end - self._start)
        self._looks += 1
        if self._looks >= FULL and self._looks % RECENT == 0:
            room = SHARE * median(self._gaps)
            self.every = min(math.ceil(median(self._costs) / room), MOST) if room > 0 else MOST
            self.every = max(self.every, 1)
