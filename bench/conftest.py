"""Conclusions of `make bench` before its table, one line for each question."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

import bench  # noqa: F401  (sets XLA_FLAGS, before jax is imported)

Taken = Mapping[str, Any]  # benchmarks by name, of one file


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print conclusions above pytest-benchmark's table."""
    session = getattr(terminalreporter.config, "_benchmarksession", None)
    by_file: dict[str, dict[str, Any]] = {}
    for one in getattr(session, "benchmarks", ()):
        file = one.fullname.partition("::")[0].rpartition("bench_")[2].removesuffix(".py")
        by_file.setdefault(file, {})[one.name] = one
    lines = [line for file, say in SAID.items() if file in by_file for line in say(by_file[file])]
    if lines:
        terminalreporter.section("conclusions (medians; the machine must be quiet)")
        terminalreporter.write_line("\n".join(lines))


def _seconds(one: Any) -> float:
    return float(one.stats.median)


def _peers(taken: Taken) -> Iterator[str]:
    ours = {name: _seconds(one) for name, one in taken.items() if name.startswith("test_ours")}
    peers = {name: _seconds(one) for name, one in taken.items() if name.startswith("test_peers")}
    if ours and peers:
        mine, other = min(ours, key=lambda n: ours[n]), min(peers, key=lambda n: peers[n])
        ratio = ours[mine] / peers[other]
        yield f"peers: {mine} takes {ratio:.3f} of {other} (wanted .80, at full width)"


def _step(taken: Taken) -> Iterator[str]:
    steps = {
        name: _seconds(one) for name, one in taken.items() if name.startswith("test_pipelined")
    }
    if steps:
        best = min(steps, key=lambda name: steps[name])
        yield f"steps: {best} is the quickest, {1e3 * steps[best]:.0f} ms"


def _clock(taken: Taken) -> Iterator[str]:
    for name, one in taken.items():
        ratio = _seconds(one) / one.extra_info["predicted"]
        yield f"clock: {name} took {ratio:.3f} of what calibration and lockstep say (wanted 1.05)"


def _bubble(taken: Taken) -> Iterator[str]:
    for m in (4, 16):
        one, two = (taken.get(f"test_step[{name}-{m}]") for name in ("1f1b", "zb_v:2"))
        if one is not None and two is not None:
            said = one.extra_info["lockstep"] / two.extra_info["lockstep"]
            ratio = _seconds(two) / _seconds(one)
            yield f"bubble: at M={m} zb_v takes {ratio:.2f} of 1f1b; lockstep says {said:.2f}"


def _compile_time(taken: Taken) -> Iterator[str]:
    plain = taken.get("test_compile[plain]")
    for name, one in taken.items():
        if plain is not None and one is not plain:
            ratio = _seconds(one) / _seconds(plain)
            yield f"compiling: {name} takes {ratio:.2f} of the plain model (wanted 2)"


SAID = {
    "bubble": _bubble,
    "clock": _clock,
    "compile_time": _compile_time,
    "peers": _peers,
    "step": _step,
}
