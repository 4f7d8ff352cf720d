"""Samples of what Python's threads do, autograd's own included, while some work runs."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]


def sample(work: Callable[[], object], seconds: float = 0.0005, most: int = 40) -> dict[str, Any]:
    """Shares of samples, in percent, in which functions were at the top of a stack, and in which
    functions of this project were anywhere in it; the `most` largest of each."""
    tops, whole, over, count = Counter[str](), Counter[str](), threading.Event(), [0]

    def look() -> None:
        mine = threading.get_ident()
        while not over.wait(seconds):
            count[0] += 1
            for thread, frame in sys._current_frames().items():
                if thread != mine:
                    names = [*_names(frame)]
                    tops[names[0]] += 1
                    whole.update({name for name in names if name.startswith(("hip", "cas", "com"))})

    looking = threading.Thread(target=look)
    looking.start()
    try:
        work()
    finally:
        over.set()
        looking.join()
    return {
        name: {each: round(100 * n / max(1, count[0]), 2) for each, n in tally.most_common(most)}
        for name, tally in (("tops", tops), ("whole", whole))
    }


def _names(frame: FrameType | None) -> Iterator[str]:
    """Functions of a stack, from its top."""
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else Path(*path.parts[-2:])
        yield f"{name}:{frame.f_code.co_qualname}"
        frame = frame.f_back
