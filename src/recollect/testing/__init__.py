"""What users can run against their own spaces, batches and storages; loaded when first used."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# name -> module. A line per public name; the module is imported when the name is first asked for.
_HOME = {
    "BatchContract": "recollect.testing.batch_contract",
    "CarrierContract": "recollect.testing.carrier_contract",
    "FaultyCarrier": "recollect.testing.faulty_carrier",
    "InferenceModelContract": "recollect.testing.model_contract",
    "RunnerContract": "recollect.testing.runner_contract",
    "SinkContract": "recollect.testing.sink_contract",
    "FakeDevice": "recollect.testing.fake_device",
    "StorageContract": "recollect.testing.storage_contract",
    "CATALOGUE": "recollect.testing.spaces",
    "FakeClock": "recollect.testing.clock",
    "assert_same": "recollect.testing.spaces",
    "max_lengths_of": "recollect.testing.spaces",
    "samples": "recollect.testing.spaces",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
