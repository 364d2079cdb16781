"""Paths of a model's variables, as every function that a user gives is asked about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


class ModelPath(tuple[Any, ...]):
    """The path of a variable in the plain model: ``("stages", 3, "up", "kernel")``.

    It is a tuple, as paths are in flax. For functions of text it also compares, splits and searches
    as ``"up.kernel"`` does, without the number of the stage, since stages that are alike share
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
    """The path of a variable of stage k."""
    return ModelPath(("stages", k, *path))


class Asked:
    """A function of a path and a variable.

    It is asked about paths. Where it has no answer to any of them it was written for text, such as
    ``names.get(path)`` of a dictionary or a regular expression, and is asked about the text.

    Args:
      function: returns None where it has no answer.
      items: paths and variables of which it will be asked.

    Attributes:
      answers: whether it has any answer.
      paths: of the items.
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
        """Answer, or None."""
        return self._function(path.text if self._of_text else path, variable)

    def _look(self, items: Sequence[tuple[ModelPath, Any]]) -> tuple[bool, Exception | None]:
        """Tell whether a path has an answer, and return the first error on the way."""
        failed = None
        for path, variable in items:
            try:
                if self(path, variable) is not None:
                    return True, failed
            except _OF_TEXT as error:
                failed = failed or error
        return False, failed


_OF_TEXT = (AttributeError, IndexError, KeyError, TypeError, ValueError)
