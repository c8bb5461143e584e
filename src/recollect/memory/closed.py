"""Closed: what is left of an object after `close()`."""

from __future__ import annotations

from typing import Any

from recollect.errors import ClosedError


class Closed:
    """Stands in for what was closed: whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("this object was closed; open or create it again")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.called
