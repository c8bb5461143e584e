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
    ├── WrongTickError (RuntimeError)      another tick has the place that this one needs
    ├── PrepareError (RuntimeError)        a batch could not be prepared; the cause is attached
    ├── WorkerError (RuntimeError)         a worker raised; its traceback is in the text
    ├── CollectorError (RuntimeError)      a collector raised what cannot be raised here as it was
    ├── PeerDiedError (RuntimeError)       another process is gone
    │   ├── WorkerDiedError                a worker process is gone
    │   └── CollectorDiedError             a collector process is gone; says which lane and why
    ├── RemoteError (RuntimeError)         a manager answered that it could not; its text is there
    │   └── ScoringError                   the scoring function raised or returned something else
    ├── DeadlineError (TimeoutError)       a deadline passed; says what was awaited
    ├── FrameError (ValueError)            a message between processes is malformed or too large
    ├── AuthError (PermissionError)        the token of a connection does not match
    ├── BatchAborted (RuntimeError)        the rollout batch was aborted
    ├── BatchFailed (RuntimeError)         too few tasks of a rollout batch are good
    ├── PipelineError (RuntimeError)       an operator or the sink raised or overran
    ├── ModelError (RuntimeError)          a model failed after its own retries
    ├── FormatError (ValueError)           a file is broken, foreign, truncated or newer
    ├── EnvContractError (ValueError)      an environment gives what it must not; names env and leaf
    ├── AttachError (ValueError)           a shared segment is gone or is not the one expected
    ├── BudgetError (MemoryError)          it would not fit in memory; nothing was allocated
    ├── ResetNeeded (gymnasium's)          a step before reset, or past the end of an episode
    └── MissingExtraError (ImportError)    an optional package is missing; names the pip command
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Any

import gymnasium.error


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


class WrongTickError(RecollectError, RuntimeError):
    """Another tick is being prepared, is ready or is in use; the message says which."""


class PrepareError(RecollectError, RuntimeError):
    """The batch of a tick could not be prepared; its cause is attached, and the tick can be started again."""


class WorkerError(RecollectError, RuntimeError):
    """A worker process raised; its traceback is in the text."""


class CollectorError(RecollectError, RuntimeError):
    """A collector process raised an exception that cannot be made again here; `type_name` says which."""

    type_name: str = ""


class PeerDiedError(RecollectError, RuntimeError):
    """Another process that this one depends on is gone."""


class WorkerDiedError(PeerDiedError):
    """A worker process is gone."""


class RemoteError(RecollectError, RuntimeError):
    """A manager answered that it could not; `.seq` is the container it is about, `.kept` the items it kept."""

    seq: int | None = None
    kept: int = 0


class ScoringError(RemoteError):
    """The scoring function raised, or returned something other than numbers by name."""


class FrameError(RecollectError, ValueError):
    """A message between processes is malformed or too large."""


class AuthError(RecollectError, PermissionError):
    """The token of a connection does not match, or its rank is taken."""


class CollectorDiedError(PeerDiedError):
    """A collector process is gone; raised from its own exception if it had one."""

    lane: int = -1
    exitcode: int | None = None
    signal: str | None = None
    report: str = ""


class DeadlineError(RecollectError, TimeoutError):
    """A deadline passed; the message says what was awaited.

    Of a rollout batch, `finished` of `expected` tasks had ended by then.
    """

    finished: int | None = None
    expected: int | None = None


class BatchAborted(RecollectError, RuntimeError):
    """The batch was aborted, for `reason`; `result` says what was delivered, None while it is not known."""

    def __init__(self, message: str, reason: str = "", result: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.reason, self.result = reason, result

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.reason, self.result)


class BatchFailed(RecollectError, RuntimeError):
    """Too few tasks of the batch are good and no more will come; `errors` by task id."""

    def __init__(self, message: str, errors: dict[int | str, str] | None = None) -> None:
        super().__init__(message)
        self.errors = errors or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.args[0], self.errors)


class PipelineError(RecollectError, RuntimeError):
    """An operator or the sink raised or overran; everything stays staged."""


class ModelError(RecollectError, RuntimeError):
    """A model failed after its own retries; the message says status and address."""


class FormatError(RecollectError, ValueError):
    """A file is broken, foreign, truncated, or of a newer format."""


class EnvContractError(RecollectError, ValueError):
    """An environment's spaces or values are not what a learner can use; the message names the leaf."""


class AttachError(RecollectError, ValueError):
    """A shared segment is gone, or is not the one the handle speaks of."""


class BudgetError(RecollectError, MemoryError):
    """The request would not fit in memory; nothing was allocated."""


class ResetNeeded(RecollectError, gymnasium.error.ResetNeeded):
    """A step was asked for before a reset, or past the end of an episode; the environment has not moved."""


class MissingExtraError(RecollectError, ImportError):
    """An optional package is not installed; the message gives the pip command."""


# The extra of this project that brings each optional package.
_EXTRAS = {
    "av": "video", "h5py": "hdf5", "httpx": "http", "PIL": "images", "pyarrow": "parquet", "rich": "cli",
    "starlette": "web", "tensorboard": "tensorboard", "torch": "torch", "tyro": "cli", "uvicorn": "web",
}  # fmt: skip


def check_installed(subject: str, *packages: str) -> None:
    """Raise MissingExtraError if some of these packages are not installed, with one command that brings them all."""
    missing = [name for name in packages if not _is_installed(name)]
    if missing:
        extras = ",".join(dict.fromkeys(_EXTRAS[name] for name in missing))
        raise MissingExtraError(
            f'{subject}: needs {" and ".join(missing)}; run pip install "recollect[{extras}]"'
        )


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return find_spec(name) is not None


def class_name(value: object) -> str:
    """Name the class of a value for a message, with its module: another library may have a class of the same name.

    >>> from collections import Counter
    >>> class_name(3), class_name(Counter())
    ('int', 'collections.Counter')
    """
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
