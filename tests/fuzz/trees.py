"""`inspect`, `verify` and `view` over trees in which a file is damaged, gone, or something else than a file."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from tests.fuzz.files import FRAMES, SPACE, rows
from tests.fuzz.mutations import garbled

import recollect as rc
from recollect.datasets import to_lerobot
from recollect.datasets.lerobot.meta import CHECKSUMS
from recollect.errors import RecollectError

Case = Callable[[Random], str]


class Tree:
    """A directory of any kind; each case damages one thing in it, looks, and makes it anew."""

    def __init__(self, path: Path, has_checksums: bool) -> None:
        self.path, self.has_checksums = path, has_checksums
        self.files = {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}
        self.reports = (self._verified(), self._inspected())
        assert self.reports[0]["ok"]

    def __call__(self, random: Random) -> str:
        name = random.choice(sorted(self.files))
        about = self._damage(name, random)
        look = random.choice((self._verified, self._verified, self._inspected, self._viewed))
        try:
            found = look()
            if look == self._verified and self.has_checksums and about != "same" and name != CHECKSUMS:
                assert not found["ok"], f"{name} {about}: verified as whole"
        except SystemExit:
            pass
        except (RecollectError, OSError):  # the command says it in one line
            pass
        finally:
            self._put()
        return f"{look.__name__} {name} {about}"

    def _damage(self, name: str, random: Random) -> str:
        file, kind = self.path / name, random.random()
        if kind < 0.7:
            new = garbled(self.files[name], random)
            file.write_bytes(new)
            return "same" if new == self.files[name] else "bytes"
        if kind < 0.75:
            os.truncate(file, len(self.files[name]) + random.choice((1, 1 << 30)))  # a hole
            return "hole"
        file.unlink()
        if kind < 0.8:
            file.mkdir()
        elif kind < 0.85:
            os.mkfifo(file)
        elif kind < 0.9:
            file.symlink_to(random.choice(("/dev/zero", "/etc/passwd", file.name, "..")))
        elif kind < 0.95:
            file.write_bytes(b"")
        return "gone"

    def _put(self) -> None:
        shutil.rmtree(self.path)
        for name, data in self.files.items():
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            (self.path / name).write_bytes(data)

    def _verified(self) -> Any:
        from recollect.datasets.minari import _arrow_table
        from recollect.datasets.verify import verify

        _arrow_table.cache_clear()
        report = verify(self.path)
        self._shown("verify")
        return report

    def _inspected(self) -> Any:
        self._shown("inspect")

    def _shown(self, command: str) -> None:
        from recollect.cli.inspect import Inspect
        from recollect.cli.verify import Verify

        kind: Any = {"inspect": Inspect, "verify": Verify}[command]
        with redirect_stdout(io.StringIO()), suppress(SystemExit):
            kind(self.path, json=bool(len(str(self.path)) % 2)).run()

    def _viewed(self) -> Any:
        from recollect.observe.view.catalogue import open_catalogue

        with open_catalogue(self.path) as catalogue:
            catalogue.about()
            catalogue.list.finish()
            n = catalogue.episodes()["count"]
            for leaf in catalogue.leaves:
                for ask in (partial(catalogue.curves, 0, leaf.name), partial(catalogue.strip, 0, leaf.name)):
                    if n and leaf.shown == ("curves" if ask.func == catalogue.curves else "picture"):
                        ask()
            if n:
                catalogue.step(0, 0)


def trees(home: Path) -> list[Case]:
    """A tree of each kind."""
    os.fsync = os.fdatasync = lambda fd: None  # type: ignore[assignment]
    from tests.fuzz.artefacts import _lerobot_2, _minari

    make = rc.ReplayBuffer.create
    found: list[Case] = []

    def dump(name: str, buf: Any, data: Any) -> None:
        buf.extend(data)
        if hasattr(buf, "mark_segment_end"):
            buf.mark_segment_end()
        if not (home / name / "manifest.json").exists():
            buf.dumps(home / name)
        buf.close()
        found.append(Tree(home / name, True))

    dump("memory", make("memory", SPACE, capacity=8, maintain_segment_metadata=True), rows(4))
    dump("hdf5", make("hdf5", SPACE, cache_path=home / "hdf5", maintain_segment_metadata=True), rows(9))
    dump("parquet", make("parquet", SPACE, cache_path=home / "parquet", piece_size=4), rows(9))
    dump("image", make("image", ((16, 16, 3), "uint8"), cache_path=home / "image"), FRAMES)
    dump("video", make("video", ((16, 16, 3), "uint8"), cache_path=home / "video"), FRAMES)
    both = {"p": ((16, 16, 3), "uint8"), "reward": ((), "float32")}
    data = {"p": FRAMES, "reward": np.ones(6, "float32")}
    buf = make("dict", both, cache_path=home / "dict", storages={"p": "video", "*": "parquet"})
    dump("dict", buf, data)
    buf = make("memory", both, capacity=8, maintain_segment_metadata=True)
    buf.extend(data)
    buf.mark_segment_end()
    to_lerobot(buf, home / "lerobot", fps=10, tasks="")
    to_lerobot(buf, home / "lerobot_video", fps=10, tasks="", video_codec="h264")
    found += [Tree(home / "lerobot", True), Tree(home / "lerobot_video", True)]
    _lerobot_2(home / "old")
    _minari(home / "minari", "hdf5")
    _minari(home / "arrow", "arrow")
    return [*found, *(Tree(home / name, False) for name in ("old", "minari", "arrow"))]
