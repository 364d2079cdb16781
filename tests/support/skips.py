"""The line at the end of a test run: which tests were skipped, why, and how to have them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

# What a reason speaks of, what is missing then, and how to have it; the first that fits.
REMEDIES = (
    (r"selenium|chromium|chromedriver|browser", "a browser", "chromium and chromedriver on PATH"),
    (r"libtpu", "the TPU compiler", "pip install 'shardpipe[tpu]'"),
    (r"cuda12", "the CUDA compiler", "pip install jax-cuda12-plugin jax-cuda12-pjrt"),
    (r"tunix", "google-tunix", "pip install google-tunix"),
    (r"artifex", "artifex", "pip install avitai-artifex"),
    (r"torch|transformers", "torch and transformers", "pip install torch transformers"),
    (r"gemma|transformer|'penzai|'bonsai", "models of other libraries", "docs/split.md names them"),
    (r"matplotlib|grain|tensorboardX", "an extra", "pip install 'shardpipe[dev]'"),
    (r"namespaces|commands ip|disk can be mounted", "rights of a Linux root", "run as root"),
    (r"\bXLA\b", "float16 of this processor", "a processor with F16C"),
    (r"\bjax\b", "another jax", "python3.12 and the newest jax"),
)


def line(reasons: Iterable[str]) -> str:
    """One line of all skips; empty without any.

    Args:
      reasons: of each skipped test, as pytest says it.
    """
    counts: Counter[tuple[str, str]] = Counter()
    total = 0
    for reason in reasons:
        total += 1
        said = reason.removeprefix("Skipped: ")
        what = next(((w, how) for key, w, how in REMEDIES if re.search(key, said)), (said, ""))
        counts[what] += 1
    if not total:
        return ""
    parts = [
        f"{count} for want of {what} ({how})" if how else f"{count}: {what}"
        for (what, how), count in counts.most_common()
    ]
    return f"skipped {total}: {', '.join(parts)}"
