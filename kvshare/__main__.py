"""`python -m kvshare`: the command, where its script is not on the PATH."""

from __future__ import annotations

import sys

from kvshare.cli import main

sys.exit(main())
