"""How hypothesis runs here: no time limit for an example, a busy machine is not a bug."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("kvshare", deadline=None)
settings.load_profile("kvshare")
