"""Which tests are about the means of Linux, and are left out where the portable ones are used."""

from __future__ import annotations

import pytest

from recollect import _core
from recollect.system import is_portable

_core.own_word()  # a core that was built without them settles it when it is loaded
needs_linux = pytest.mark.skipif(
    is_portable(), reason="about memfd, /proc or control groups, which are not used"
)
