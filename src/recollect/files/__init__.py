"""Files: directories that one process writes, names that stay inside, whole writes, and records read without trust.

`directory` is the lock that every writer of a directory takes, and the list of what it made there; `lock` is how open
files are locked; `names` opens files without following links; `record` reads what may be damaged or forged; `sync`
is how every file that must survive a crash is written: replaced whole, sealed, or moved to its place.
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
from recollect.files.sync import (
    About,
    about_file,
    exchange_directories,
    file_crc,
    make_directory,
    move_directory,
    remove_empty,
    replace_file,
    seal,
    seal_file,
    sync_directory,
    sync_file,
    write_at,
)

__all__ = [
    "About",
    "OwnedDirectory",
    "about_file",
    "check_name",
    "check_plain",
    "exchange_directories",
    "file_crc",
    "has_name",
    "lock_file",
    "make_directory",
    "make_inside",
    "move_directory",
    "open_inside",
    "open_named",
    "remove_empty",
    "remove_inside",
    "replace_file",
    "seal",
    "seal_file",
    "sync_directory",
    "sync_file",
    "write_at",
]
