"""The public suite of sinks: a write is all or nothing, and `holds` tells whether it was done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import recollect.rollout as rr


class SinkContract:
    """Subclass it and give `make_sink(tmp_path)` and `rows_in(sink)`, the uids that were delivered, in order."""

    def make_sink(self, tmp_path: Path) -> Any:
        """An empty sink."""
        raise NotImplementedError

    def rows_in(self, sink: Any) -> list[Any]:
        """All (group_id, run_id, step) in the sink."""
        raise NotImplementedError

    @pytest.fixture
    def sink(self, tmp_path: Path) -> Any:
        made = self.make_sink(tmp_path)
        yield made
        made.close()

    def test_a_write_delivers_all_rows_in_order(self, sink: Any) -> None:
        x = _rows(1, 3)
        sink.write(x, "c-g1-1")
        assert self.rows_in(sink) == x.uids.tolist()

    def test_holds_tells_what_was_written(self, sink: Any) -> None:
        assert not sink.holds("c-g1-1")
        sink.write(_rows(1, 2), "c-g1-1")
        assert sink.holds("c-g1-1") and not sink.holds("c-g2-2")
        sink.write(_rows(2, 1), "c-g2-2")
        assert sink.holds("c-g1-1") and sink.holds("c-g2-2")

    def test_what_is_refused_leaves_nothing(self, sink: Any) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 (whichever the sink raises)
            sink.write(object(), "c-g3-3")
        assert not sink.holds("c-g3-3") and self.rows_in(sink) == []

    def test_close_may_be_called_twice(self, sink: Any) -> None:
        sink.close()
        sink.close()


def _rows(group: int, n: int) -> Any:
    made = [rr.Experience(tokens=[1, 2], prompt_length=1, logprobs=[-1.0], reward=float(i)) for i in range(n)]
    return rr.decode(rr.encode(made, group_id=group, run_id=0))
