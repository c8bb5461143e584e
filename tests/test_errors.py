"""What each error is besides: `except ValueError` keeps working."""

from __future__ import annotations

import gymnasium.error
import pytest

import recollect as rc

ALSO: dict[str, type[BaseException]] = {
    "SchemaError": ValueError,
    "MissingLeafError": KeyError,
    "DtypeError": TypeError,
    "ReadOnlyError": TypeError,
    "SegmentOpenError": RuntimeError,
    "EmptyError": RuntimeError,
    "LaneBusyError": RuntimeError,
    "ContentionError": RuntimeError,
    "DeadlineError": TimeoutError,
    "WorkerError": RuntimeError,
    "WorkerDiedError": rc.PeerDiedError,
    "FormatError": ValueError,
    "ClosedError": RuntimeError,
    "ResetNeeded": gymnasium.error.ResetNeeded,
    "MissingExtraError": ImportError,
}


@pytest.mark.parametrize("name", ALSO)
def test_an_error_is_ours_and_the_builtin_that_callers_expect(name: str) -> None:
    error = getattr(rc, name)
    assert issubclass(error, rc.RecollectError) and issubclass(error, ALSO[name])


@pytest.mark.parametrize("name", ["MissingLeafError", "DtypeError"])
def test_children_of_the_schema_error(name: str) -> None:
    assert issubclass(getattr(rc, name), rc.SchemaError)
