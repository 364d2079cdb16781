"""A mark for tests that compute in float16, for which XLA for CPU needs F16C."""

from __future__ import annotations

import os

import pytest

needs_float16 = pytest.mark.skipif(
    "xla_cpu_max_isa=SSE" in os.environ.get("XLA_FLAGS", ""),
    reason="XLA for CPU converts no float16 without F16C, which --xla_cpu_max_isa=SSE4_2 forbids",
)
