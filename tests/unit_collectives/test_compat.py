"""Private or changing names of JAX: their one place, and a check that they are found.

Errors of JAX that have only a text are provoked here as JAX raises them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback
from jax.extend.core import Primitive

from collectives import compat, make_mesh
from pipeline.core.autodiff.jaxpr import narrow, primitives
from tests.docs.test_rooms import modules

PRIVATE = re.compile(r"(jax|jaxlib|flax|optax)(\.\w+)*\._(?!_)\w+(\.|$)")
HOME = "collectives.compat"
# Primitives of the table that not every release has.
OF_SOME_RELEASES = {
    "closed_call": "up to 0.10.2",
    "eval_jaxpr": "from 0.12 on",
    "log2": "from 0.12 on",
    "one_minus_square": "from 0.12 on",
    "polynomial": "from 0.12 on",
}
# What `jax.nn` and `jax.numpy` make of real numbers and the table leaves out: products and what is
# as dear, and `cond`, whose branches are seen to by those who walk.
HEAVY = {
    *("bessel_i0e", "bessel_i1e", "cond", "conv_general_dilated", "custom_linear_solve"),
    *("digamma", "dot_general", "eig", "lgamma", "lu", "scaled_dot", "sort", "triangular_solve"),
    *("cholesky", "eigh", "geqrf", "householder_product", "schur", "svd", "qr"),
}


def names(tree: ast.Module) -> set[str]:
    """Modules and attributes with their whole dotted names, as far as they are written."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    ("text", "is_private"),
    [
        ("from jax._src import core", True),
        ("import jax._src.core", True),
        ("from flax.nnx import _x", True),
        ("jax._src.core.Effect", True),
        ("import jax.numpy, pipeline._x", False),
        ("jax.__version__", False),
        ("from pipeline.layers import _x; self._jax._src", False),
    ],
)
def test_a_private_name_is_seen(text: str, is_private: bool) -> None:
    assert any(map(PRIVATE.match, names(ast.parse(text)))) == is_private


@pytest.mark.slow
def test_what_is_private_or_of_one_release_is_in_one_file() -> None:
    found = set()
    for module, file in modules().items():
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if any(PRIVATE.match(n) or n == "jax.__version_info__" for n in names(tree)):
            found.add(module)
    assert found == {HOME}


def test_effects() -> None:
    def effects(f):
        return jax.make_jaxpr(f)(1.0).effects

    def with_ref(x):
        ref = jax.new_ref(x)
        ref[...] += 1.0
        return ref[...]

    def tells(x):
        return io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x)

    def tells_in_order(x):
        return io_callback(lambda x: x, jax.ShapeDtypeStruct((), jnp.float32), x, ordered=True)

    def prints(x):
        jax.debug.print("{}", x)
        return x

    asked = compat.has_effect, compat.may_not_repeat, compat.has_check
    for f, want in (
        (jnp.sin, (False, False, False)),
        (tells, (True, True, False)),
        (tells_in_order, (True, True, False)),
        (prints, (True, False, False)),
    ):
        assert tuple(ask(effects(f)) for ask in asked) == want
    inner = [eqn.effects for eqn in jax.make_jaxpr(with_ref)(1.0).eqns]
    assert any(inner)
    assert not compat.has_effect(frozenset().union(*inner[1:]))


def writes(x):
    """As the kernel does: adds to a ref in a loop of as many trips as it finds."""
    total = jax.new_ref(jnp.zeros_like(x))

    def trip(n):
        total[...] += x
        return n + 1

    jax.lax.while_loop(lambda n: n < 3, trip, 0)
    return total[...]


@pytest.mark.parametrize("wrap", [jax.jit, jax.custom_batching.sequential_vmap])
def test_reverse_mode_through_refs(wrap) -> None:
    none = jax.sharding.PartitionSpec()
    kernel = jax.shard_map(
        writes, mesh=make_mesh(stage=1), in_specs=none, out_specs=none, check_vma=False
    )
    with pytest.raises((AttributeError, ValueError)) as caught:
        jax.grad(lambda x: jnp.sum(wrap(kernel)(x)))(jnp.ones(2))
    assert compat.is_of_refs(caught.value)


def test_refs_are_replaced_by_values_and_custom_derivatives_stay() -> None:
    @jax.custom_vjp
    def same(x):
        return x

    same.defvjp(lambda x: (x, None), lambda _, g: (10 * g,))

    def f(x):
        total = jax.new_ref(jnp.zeros_like(x))
        total[...] += same(x)
        return total[...]

    assert jax.grad(compat.without_refs(f))(2.0) == 10


def test_other_errors_are_not_taken_for_those() -> None:
    with pytest.raises(ValueError, match="Reverse-mode") as caught:
        jax.grad(lambda x: jax.lax.while_loop(lambda x: x < 3, lambda x: x + 1, x))(1.0)
    assert not compat.is_of_refs(caught.value)


def test_a_jit_that_fixes_shardings() -> None:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for f, want in ((jax.jit(jnp.sin), False), (jax.jit(jnp.sin, out_shardings=here), True)):
        (eqn,) = jax.make_jaxpr(f)(1.0).eqns
        assert compat.fixes_shardings(eqn) == want


def test_sizes_of_a_scan() -> None:
    def f(a, b, xs):
        return jax.lax.scan(lambda c, x: ((c[0] + a + x, c[1] * b), x), (a, b), xs)

    (eqn,) = jax.make_jaxpr(f)(1.0, 2.0, jnp.ones(3)).eqns
    assert compat.loop_sizes(eqn) == (2, 2)


def test_the_table_knows_primitives_by_the_names_they_have() -> None:
    """One that was renamed would be heavy, and nobody would notice."""
    homes = "jax.", narrow.__name__
    modules = [module for name, module in sys.modules.items() if name.startswith(homes)]
    held = [value for module in modules for value in vars(module).values()]
    there = {one.name for one in held if isinstance(one, Primitive)}
    assert primitives.names() - there <= set(OF_SOME_RELEASES)


def names_in(jaxpr: Any) -> set[str]:
    """Names of the primitives of a jaxpr and of all that its equations hold."""
    found = {eqn.primitive.name for eqn in jaxpr.eqns}
    within = [body for eqn in jaxpr.eqns for body in primitives.jaxprs_of(eqn)]
    return found.union(*(names_in(getattr(body, "jaxpr", body)) for body in within))


def made_of(function: Callable[..., Any], operands: tuple[Any, ...]) -> set[str]:
    """The primitives of a function and of its derivative, if it takes these operands."""

    def backward(*operands: Any) -> Any:
        out, vjp = jax.vjp(function, *operands)
        return vjp(out)

    for traced in (backward, function):
        try:
            return names_in(jax.make_jaxpr(traced)(*operands).jaxpr)
        except Exception:  # noqa: BLE001 (it takes other operands: any of JAX's errors)
            continue
    return set()


@pytest.mark.slow
def test_the_table_knows_what_functions_of_jax_are_made_of() -> None:
    """One that is new would be heavy, and its result a residual: `stack` and `polynomial` were."""
    array, made = jnp.ones((4, 4)), {}
    for module in (jax.nn, jnp):
        for name, function in vars(module).items():
            if name.startswith("_") or not callable(function):
                continue
            for operands in ((array,), (array, array)):
                for primitive in made_of(function, operands):
                    made[primitive] = f"{module.__name__}.{name}"
    assert len(made) > 80
    unknown = {name: made[name] for name in made.keys() - primitives.names() - HEAVY}
    assert not unknown
