"""The proof of benchmarks/roundtrip.py in small: recorded, dumped, converted to every form and back, unchanged."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import recollect as rc

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "roundtrip.py"


@pytest.fixture(scope="module")
def roundtrip() -> Any:
    spec: Any = importlib.util.spec_from_file_location("roundtrip", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_recorded_set_goes_through_every_form_and_back(roundtrip: Any, tmp_path: Path) -> None:
    report = roundtrip.run("CartPole-v1", 300, tmp_path)
    assert report["equal"] == ["parquet", "hdf5", "lerobot"] and report["episodes"] > 5


def test_the_comparison_sees_one_changed_value_and_one_moved_end(roundtrip: Any, tmp_path: Path) -> None:
    whole = roundtrip.record("CartPole-v1", 40)
    for name, change in {"value": 1, "end": 0}.items():
        data, ends = whole[:], [False] * 40
        for _, end in whole.get_segments():
            ends[end - 1] = True
        if change:
            data["next_obs"][7, 2] += 1e-6
        else:
            ends[0] = not ends[0]
        with rc.ReplayBuffer.create(
            "memory", whole.single_space, capacity=40, maintain_segment_metadata=True
        ) as other:
            other.extend(data, ends=ends)
            other.dumps(tmp_path / name)
        with pytest.raises(AssertionError, match="differs" if change else "other segments"):
            roundtrip.compare(whole, tmp_path / name)
