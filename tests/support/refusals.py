"""The message of a call that is refused, to be compared as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(call: Callable[..., Any], *arguments: Any, **options: Any) -> str:
    """Call with the arguments; return the text of the ValueError that it raises."""
    with pytest.raises(ValueError) as error:
        call(*arguments, **options)
    return str(error.value)
