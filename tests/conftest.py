"""Eight virtual CPU devices and strict settings for every test.

The environment is set while this file is imported, before any test module can import jax.
"""

import contextlib
import ctypes
import gc
import itertools
import os
import resource
import signal
import zlib
from collections import defaultdict
from pathlib import Path

MANY_MAPS, BETWEEN_LOOKS = 20_000, 8
MUCH_MEMORY = 1_300 * 2**20  # bytes
STRIDE = 8
# Which part of the slow tests runs, such as "2/8": CI takes another one for each commit.
PART, PARTS = map(int, os.environ.get("SLOW_PART", "0/1").split("/"))
DEVICES = "--xla_force_host_platform_device_count=8"
# The last flag wins: what the caller has set stays, except for the number of devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"

# Under nohup SIGHUP is ignored, and tests of signals would inherit that.
if hasattr(signal, "SIGHUP"):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import hypothesis  # noqa: E402
import jax  # noqa: E402
import pytest  # noqa: E402

# Promotion between dtypes or ranks is nearly always a bug: an int tick times a float loss, a
# `[N]` weight broadcast over `[N, N]`. Flax and optax run under both.
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Examples that compile have no use for a deadline, and a red run must be red everywhere.
hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture
def lenient():
    """Models and trainers of others promote ranks and dtypes."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def standard_promotion():
    """Optax multiplies its int32 step by floats."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow cases: of a dear test `make test` runs the first case, and CI others.

    Of a test's slow cases `make test-slow` runs every eighth, and one at least: which one it begins
    with is drawn from the test's name, as is the part that a test belongs to. `make test-all` runs
    all.
    """
    of_test = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and not item.get_closest_marker("slow"):
            of_test[item.nodeid.partition("[")[0]].append(item)
    for cases in of_test.values():
        for item in cases[1:]:
            item.add_marker(pytest.mark.slow)
    of_test.clear()
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("exhaustive"):
            of_test[item.nodeid.partition("[")[0]].append(item)
    for name, cases in of_test.items():
        if name.startswith("tests/docs/"):  # pages and lessons always run
            continue
        drawn = zlib.crc32(name.encode())
        first = drawn % min(len(cases), STRIDE)
        for n, item in enumerate(cases):
            if n % STRIDE != first or drawn // STRIDE % PARTS != PART:
                item.add_marker(pytest.mark.exhaustive)


def pytest_collection_finish() -> None:
    """Freeze imported objects: looking through them for garbage takes a tenth of every trace."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


_tests = itertools.count(1)
_most = [MUCH_MEMORY]


def pytest_runtest_teardown() -> None:
    """Every compiled program is several memory maps, of which Linux gives a process 65,530.

    Pipelines drop theirs; what tests compile beside them waits for the collector, which is rare. To
    count ten thousand takes 13 ms, as long as many a test. A worker takes no more than 2 GiB: what
    was compiled and traced goes as it comes near, and the memory goes back to the system.
    """
    if next(_tests) % BETWEEN_LOOKS:
        return
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return
    if _resident() > _most[0] or maps.read_bytes().count(b"\n") > MANY_MAPS:
        jax.clear_caches()
        gc.collect()
        with contextlib.suppress(OSError, AttributeError):  # of glibc
            ctypes.CDLL(None).malloc_trim(0)
        _most[0] = max(MUCH_MEMORY, int(1.3 * _resident()))  # what stays is not looked at again


def _resident() -> int:
    """Bytes of this process that lie in memory."""
    return int(Path("/proc/self/statm").read_bytes().split()[1]) * resource.getpagesize()


def pytest_report_header() -> str:
    """Says what is being tested: the checkout or an installed wheel, and on which jax."""
    import collectives

    return f"shardpipe from {Path(collectives.__file__).parents[1]}, jax {jax.__version__}"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says in one line what was skipped, why, and how to have it."""
    from tests.support.skips import line

    reports = terminalreporter.stats.get("skipped", [])
    reasons = [r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in reports]
    if said := line(reasons):
        terminalreporter.write_line(said)
