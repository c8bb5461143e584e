"""Every exception that Recollect raises on purpose.

Each is also the builtin a caller would expect, so `except ValueError` keeps working::

    RecollectError
    ├── SchemaError (ValueError)           a value does not fit its space; names the leaf
    │   ├── MissingLeafError (KeyError)    a leaf is absent
    │   └── DtypeError (TypeError)         a leaf has another dtype
    ├── ReadOnlyError (TypeError)          this object cannot be written
    ├── SegmentOpenError (RuntimeError)    the call needs closed segments
    ├── EmptyError (RuntimeError)          nothing to draw from
    ├── LaneBusyError (RuntimeError)       the lane belongs to another live process
    ├── ContentionError (RuntimeError)     a read was lapped by writers for too long
    ├── ClosedError (RuntimeError)         use after close()
    ├── WorkerError (RuntimeError)         a worker raised; its traceback is in the text
    ├── PeerDiedError (RuntimeError)       another process is gone
    │   └── WorkerDiedError
    ├── DeadlineError (TimeoutError)       a deadline passed; says what was awaited
    ├── FormatError (ValueError)           a file is broken, foreign, truncated or newer
    ├── AttachError (ValueError)           a shared segment is gone or is not the one expected
    ├── BudgetError (MemoryError)          it would not fit in memory; nothing was allocated
    └── MissingExtraError (ImportError)    an optional package is missing; names the pip command
"""

from __future__ import annotations


class RecollectError(Exception):
    """Base of everything that Recollect raises on purpose."""


class SchemaError(RecollectError, ValueError):
    """A value does not fit its space; the message names the leaf."""


class MissingLeafError(SchemaError, KeyError):
    """A leaf of the space is absent from the value."""

    # KeyError prints the repr of its argument; a sentence should print as a sentence.
    __str__ = Exception.__str__


class DtypeError(SchemaError, TypeError):
    """A leaf has another dtype than its space says."""


class ReadOnlyError(RecollectError, TypeError):
    """A write or removal that this object cannot do; names the object to change instead."""


class SegmentOpenError(RecollectError, RuntimeError):
    """The call needs closed segments."""


class EmptyError(RecollectError, RuntimeError):
    """There is nothing to draw from."""


class LaneBusyError(RecollectError, RuntimeError):
    """The lane belongs to another live process, or no lane is free."""


class ContentionError(RecollectError, RuntimeError):
    """A read was lapped by writers again and again until its time was up."""


class ClosedError(RecollectError, RuntimeError):
    """The object was used after close()."""


class WorkerError(RecollectError, RuntimeError):
    """A worker process raised; its traceback is in the text."""


class PeerDiedError(RecollectError, RuntimeError):
    """Another process that this one depends on is gone."""


class WorkerDiedError(PeerDiedError):
    """A worker process is gone."""


class DeadlineError(RecollectError, TimeoutError):
    """A deadline passed; the message says what was awaited."""


class FormatError(RecollectError, ValueError):
    """A file is broken, foreign, truncated, or of a newer format."""


class AttachError(RecollectError, ValueError):
    """A shared segment is gone, or is not the one the handle speaks of."""


class BudgetError(RecollectError, MemoryError):
    """The request would not fit in memory; nothing was allocated."""


class MissingExtraError(RecollectError, ImportError):
    """An optional package is not installed; the message gives the pip command."""
