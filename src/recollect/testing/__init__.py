"""What users can run against their own spaces, batches and storages; loaded when first used."""

from __future__ import annotations

from recollect._lazy import lazy

# name -> module. A line per public name; the module is imported when the name is first asked for.
_MODULE_OF = {
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

__getattr__, __dir__, __all__ = lazy(__name__, _MODULE_OF)
