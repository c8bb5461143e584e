"""The names of recollect.remote for type checkers; `__init__.py` loads each when it is first used."""

from recollect.remote.carriers.base import ANY as ANY
from recollect.remote.carriers.base import Carrier as Carrier
from recollect.remote.carriers.local import LocalCarrier as LocalCarrier
from recollect.remote.carriers.mpi import MpiCarrier as MpiCarrier
from recollect.remote.carriers.ray import RayCarrier as RayCarrier
from recollect.remote.carriers.tcp import TcpCarrier as TcpCarrier
from recollect.remote.carriers.torch import TorchCarrier as TorchCarrier
from recollect.remote.client.client import RemoteReplay as RemoteReplay
from recollect.remote.config import Checkpoint as Checkpoint
from recollect.remote.config import Limits as Limits
from recollect.remote.config import Shards as Shards
from recollect.remote.items.trajectories import Trajectories as Trajectories
from recollect.remote.launcher import launch as launch
from recollect.remote.manager.diversity import Diversity as Diversity
from recollect.remote.manager.manager import ReplayBufferManager as ReplayBufferManager
from recollect.remote.messages import DATA_TAG as DATA_TAG
from recollect.remote.messages import METADATA_TAG as METADATA_TAG
from recollect.remote.ranks import rank_layout as rank_layout
from recollect.remote.stats import ClientStats as ClientStats
from recollect.remote.stats import ManagerStats as ManagerStats
