"""Files: directories that one process writes, names that stay inside, whole writes, and records read without trust.

`directory` is the lock that every writer of a directory takes, and the list of what it made there; `lock` is how open
files are locked; `names` opens files without following links; `record` reads what may be damaged or forged; `sync`
makes directories and replaces files so that a crash leaves the old or the new.
"""

from recollect.files.directory import OwnedDirectory
from recollect.files.lock import lock_file
from recollect.files.names import (
    check_name,
    check_plain,
    has_name,
    make_inside,
    open_inside,
    open_named,
    remove_inside,
)
from recollect.files.sync import make_directory, remove_empty, replace_file, sync_directory, write_at

__all__ = [
    "OwnedDirectory",
    "check_name",
    "check_plain",
    "has_name",
    "lock_file",
    "make_directory",
    "make_inside",
    "open_inside",
    "open_named",
    "remove_empty",
    "remove_inside",
    "replace_file",
    "sync_directory",
    "write_at",
]
