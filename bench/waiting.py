"""A stage whose work is to wait: any number of ranks then fit on any number of cores.

What is left of a step is its timetable: who waits for whom, and what messages take.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import bench  # (sets XLA_FLAGS, before jax is imported)

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
from flax import nnx

from collectives import vary, varying_axes

FORWARD, BACKWARD = 0.010, 0.020  # seconds


def elsewhere(module: str, given: Sequence[Any], devices: int, rounds: int) -> list[dict[str, Any]]:
    """The result of ``python -m MODULE --waiting ROUNDS`` in a process of so many devices.

    It reads them as JSON, a list of their fields, and writes what it found likewise.

    Raises:
      RuntimeError: it failed; it has said why.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, "--waiting", str(rounds)],
        env=os.environ | {"XLA_FLAGS": f"{bench.COUNT}={devices}"},
        input=json.dumps([asdict(one) for one in given]),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"stages that wait, in {module}: the reason is above")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def parser_of(module: str, about: str | None, rounds: int) -> argparse.ArgumentParser:
    """The options that every module which asks for `elsewhere` has; others may be added.

    Args:
      module: its name.
      about: its docstring.
      rounds: turns, unless another number is given.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"turns ({rounds})")
    parser.add_argument("--json", action="store_true", help="print JSON in the place of a table")
    parser.add_argument("--waiting", type=int, metavar="ROUNDS", help=argparse.SUPPRESS)
    return parser


def is_elsewhere(
    options: argparse.Namespace, kind: type[Any], run: Callable[[list[Any], int], Sequence[Any]]
) -> bool:
    """True in the process that `elsewhere` has started, after all is done.

    Args:
      options: as `parser_of` takes them.
      kind: of the records that are read.
      run: what makes other records of them and of a number of rounds.
    """
    if not options.waiting:
        return False
    given = [kind(**one) for one in json.load(sys.stdin)]
    print(json.dumps([asdict(one) for one in run(given, options.waiting)]))
    return True


def machine(cores: int) -> str:
    """Versions and cores of this machine."""
    return f"jax {jax.__version__}, {platform.machine()}, {cores} cores"


def show(
    options: argparse.Namespace, said: str, where: str, records: tuple[str, list[Any]], text: str
) -> None:
    """Print what was found: as JSON, or to be read.

    Args:
      options: as `parser_of` takes them.
      said: the conclusion.
      where: on which machine.
      records: their name, and what JSON has of each.
      text: tables.
    """
    if options.json:
        name, found = records
        print(json.dumps({"conclusion": said.splitlines(), "where": where, name: found}, indent=2))
        return
    print(said, where, "", text, sep="\n")


def _pause(x: jax.Array, duration: float) -> jax.Array:
    """x, after a while."""

    def wait(_: Any) -> Any:
        time.sleep(duration)
        return np.zeros((), np.float32)

    nothing = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), x.reshape(-1)[0])
    return x + vary(nothing, tuple(varying_axes(x)))


@jax.custom_vjp
def _waited(x: jax.Array) -> jax.Array:
    return _pause(x, FORWARD)


def _forward(x: jax.Array) -> tuple[jax.Array, None]:
    return _pause(x, FORWARD), None


def _backward(_: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (_pause(gradient, BACKWARD),)


_waited.defvjp(_forward, _backward)


class Waiting(nnx.Module):
    """Layers that scale their input, one wait each: [rows, d] -> [rows, d]."""

    def __init__(self, d: int, count: int, rngs: nnx.Rngs) -> None:
        self.blocks = nnx.List([nnx.Param(rngs.params.normal((1, d))) for _ in range(count)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for scale in self.blocks:
            x = x + _waited(0.1 * jnp.tanh(x * scale[...]))  # the weights' gradient waits too
        return x


def waited(x: jax.Array, forward: float, backward: float) -> jax.Array:
    """x, after a while of seconds; and so its gradient."""

    @jax.custom_vjp
    def held_up(x: jax.Array) -> jax.Array:
        return _pause(x, forward) if forward else x

    held_up.defvjp(lambda x: (held_up(x), None), lambda _, g: (_pause(g, backward),))
    return held_up(x)


class Halves(nnx.Module):
    """Layers whose F, I and W wait equally long: [rows, d] -> [rows, d].

    Args:
      d: width.
      duration: of each, in seconds.
      rngs: for the weights.
      count: of layers.
    """

    def __init__(self, d: int, duration: float, rngs: nnx.Rngs, count: int = 1) -> None:
        self.scales = nnx.List([nnx.Param(rngs.params.normal((1, d))) for _ in range(count)])
        self.duration = duration

    def __call__(self, x: jax.Array) -> jax.Array:
        for scale in self.scales:
            held = waited(scale[...], 0.0, self.duration)
            x = x + waited(0.1 * jnp.tanh(x * held), self.duration, self.duration)
        return x
