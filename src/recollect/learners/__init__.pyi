"""The names of recollect.learners for type checkers; `__init__.py` loads each when it is first used."""

from recollect.learners import appo as appo
from recollect.learners import sac as sac
from recollect.learners.normalization import normalize as normalize
