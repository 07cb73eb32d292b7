"""``python -m burt_numba.cli``, the same as ``burt-numba``."""

import sys

from burt_numba.cli.command import main

sys.exit(main())
