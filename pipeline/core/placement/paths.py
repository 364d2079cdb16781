"""Paths of a model's variables, as the user's functions of paths and variables receive them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


class ModelPath(tuple[Any, ...]):
    """The path of a variable in the plain model: ``("stages", 3, "up", "kernel")``.

    It is a tuple, like paths in flax. For functions of text it also compares, splits and searches
    like the text ``"up.kernel"``, without the number of the stage, because equal stages share
    arrays.
    """

    __slots__ = ()

    @property
    def text(self) -> str:
        """The path as text: ``up.kernel`` in a stage, ``embed.table`` in another part."""
        return ".".join(map(str, self[2:] if self[:1] == ("stages",) else self))

    def __contains__(self, item: object) -> bool:
        if isinstance(item, str) and "." in item:
            return item in self.text
        return super().__contains__(item)

    def __eq__(self, other: object) -> bool:
        return self.text == other if isinstance(other, str) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = tuple.__hash__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.text, name)


def of_stage(k: int, path: Any) -> ModelPath:
    return ModelPath(("stages", k, *path))


class Asked:
    """A user's function of a path and a variable.

    The function is called with paths. If it has no answer for any path, it was written for text,
    such as ``names.get(path)`` of a dictionary or a regular expression. Then it is called with the
    text of paths.

    Args:
      function: a function that returns None for paths without an answer.
      items: the paths and variables for which it will be called.

    Attributes:
      answers: whether the function has an answer for any item.
    """

    def __init__(
        self,
        function: Callable[[Any, Any], Any],
        items: Iterable[tuple[ModelPath, Any]],
    ) -> None:
        self._function, self._of_text, pairs = function, False, [*items]
        self.paths = [path for path, _ in pairs]
        self.answers, error = self._look(pairs)
        if not self.answers:
            self._of_text = True
            self.answers, also = self._look(pairs)
            if error is not None and also is not None:
                raise error

    def __call__(self, path: ModelPath, variable: Any) -> Any:
        """Return the function's answer, or None."""
        return self._function(path.text if self._of_text else path, variable)

    def _look(self, items: Sequence[tuple[ModelPath, Any]]) -> tuple[bool, Exception | None]:
        """Tell whether any item has an answer; also return the first error."""
        failed = None
        for path, variable in items:
            try:
                if self(path, variable) is not None:
                    return True, failed
            except _OF_TEXT as error:
                failed = failed or error
        return False, failed


_OF_TEXT = (AttributeError, IndexError, KeyError, TypeError, ValueError)
