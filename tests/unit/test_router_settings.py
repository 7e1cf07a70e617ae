"""Settings of routers, and the models that have them."""

from __future__ import annotations
