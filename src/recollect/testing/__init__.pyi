"""The names of recollect.testing for type checkers; `__init__.py` loads each when it is first used."""

from recollect.testing.batch_contract import BatchContract as BatchContract
from recollect.testing.carrier_contract import CarrierContract as CarrierContract
from recollect.testing.clock import FakeClock as FakeClock
from recollect.testing.fake_device import FakeDevice as FakeDevice
from recollect.testing.faulty_carrier import FaultyCarrier as FaultyCarrier
from recollect.testing.model_contract import InferenceModelContract as InferenceModelContract
from recollect.testing.runner_contract import RunnerContract as RunnerContract
from recollect.testing.sink_contract import SinkContract as SinkContract
from recollect.testing.spaces import CATALOGUE as CATALOGUE
from recollect.testing.spaces import assert_same as assert_same
from recollect.testing.spaces import max_lengths_of as max_lengths_of
from recollect.testing.spaces import samples as samples
from recollect.testing.storage_contract import StorageContract as StorageContract
