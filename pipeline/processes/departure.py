"""How this process ends: an exception, `sys.exit` with a code, or the end of its program.

The others must hear of it before the interpreter ends, for there jax waits minutes for them, while
they wait for this process. Python calls a hook for an exception; for `SystemExit` it has none.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

Failed = Callable[[str, int], None]  # (how, exit code)


def install(failed: Failed, leaving: Callable[[], None]) -> None:
    """Ask to be told, in this process and not in those that it forks.

    Args:
      failed: called when an exception, or `sys.exit` with a code other than 0, ends the process.
      leaving: called when the interpreter ends, in any case, before jax's own end.
    """
    own = os.getpid()

    def tell(how: str, code: int) -> None:
        if os.getpid() == own:
            failed(how, code)

    hook = _catch_exceptions(tell)
    _catch_exits(tell)

    def leave() -> None:
        if os.getpid() != own:
            return
        # Somebody has put another hook in the place of ours.
        error = getattr(sys, "last_value", None)
        if error is not None and sys.excepthook is not hook and not hasattr(sys, "ps1"):
            failed(_words(error), 1)
        leaving()

    atexit.register(leave)


def _catch_exceptions(tell: Failed) -> Callable[..., None]:
    before = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        before(kind, error, traceback)
        tell(_words(error), 1)

    sys.excepthook = excepthook
    return excepthook


def _words(error: BaseException) -> str:
    first = str(error).split("\n", 1)[0]
    return f"it failed with {type(error).__name__}{first and ': '}{first}"


def _catch_exits(tell: Failed) -> None:
    before = sys.exit

    def leave(status: Any = None, /) -> NoReturn:
        try:
            before(status)
        except SystemExit as error:
            if code := _exit_code(error.code):
                error.uncaught = _Uncaught(tell, code)  # type: ignore[attr-defined]
            raise

    leave.__doc__ = before.__doc__
    sys.exit = leave


def _exit_code(status: object) -> int:
    """What the shell sees of a `SystemExit`'s code: 0 for None, 1 for text."""
    if status is None:
        return 0
    return status & 0xFF if isinstance(status, int) else 1


class _Uncaught:
    """A part of an exception: whoever catches it lets it go from a frame, the interpreter has none.

    Args:
      tell: called if nobody has caught it.
      code: of the exit.
    """

    def __init__(self, tell: Failed, code: int) -> None:
        self._tell, self._code = tell, code

    def __del__(self) -> None:
        try:
            sys._getframe(1)  # noqa: SLF001  (there is no other way to ask)
        except ValueError:
            self._tell(f"its program ended with sys.exit({self._code})", self._code)
