"""An orderly end of programs that have started processes and made namespaces."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

import typer

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def orderly_end(program: str) -> Iterator[None]:
    """End on SIGTERM or SIGHUP like on an interrupt, so that namespaces and ranks end, too."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise typer.Exit(128 + number)

    mine = threading.current_thread() is threading.main_thread()  # else signals are another's
    before = {each: signal.getsignal(each) for each in _ENDING if mine}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:  # nohup ignores it
            signal.signal(each, leave)
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{program}: interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
