"""In which dtypes parameters are kept and computed with.

Parameters may be kept in more bits than a step computes in: an optimizer's small updates would be
lost on bfloat16 (P. Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740). They are
cast where they are used; gradients come back through the cast and are summed as ``grad_dtype``
says.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import jaxprs_in_params

from pipeline.base.tree import Tree


def check_dtype(name: str, dtype: Any) -> Any:
    """The option in its canonical form, None if it is not given.

    Raises:
      ValueError: no dtype in which a model can be kept or computed.
    """
    return None if dtype is None else floating(name, dtype, "None, for what the model has")


def floating(name: str, dtype: Any, others: str) -> Any:
    """A dtype to compute in, in its canonical form.

    Args:
      name: of the option.
      dtype: what was given.
      others: in words, what else the option may be.

    Raises:
      ValueError: not a float of 16 bits or more, or one that JAX does not have now.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating) or found.itemsize < 2:
        raise ValueError(
            f"{name}={dtype!r}: must be {others}, or a floating dtype of 16 bits or more, such as "
            f"jnp.bfloat16"
        )
    if jax.dtypes.canonicalize_dtype(found) != found:
        raise ValueError(
            f"{name}={dtype!r}: JAX has no {found.name} unless jax_enable_x64 is set; set it, or "
            f"use jnp.float32"
        )
    return found


def as_computed(tree: Tree, dtype: Any) -> Tree:
    """Leaves of real floats in a dtype; all as they are if it is None."""
    if dtype is None:
        return tree
    return jax.tree.map(lambda x: x.astype(dtype) if _is_real(x) else x, tree)


def narrows(jaxpr: Any) -> bool:
    """Whether a computation, at any depth, makes floats of fewer exponents than float32 has.

    In those (float16, and the kinds of float8) a gradient may vanish or overflow, so it matters
    whether a loss is scaled before or after it is differentiated. bfloat16 has as many as float32.
    What is only moved, such as inputs that are kept in float16, does not count.
    """
    for eqn in jaxpr.eqns:
        bodies = list(jaxprs_in_params(eqn.params))
        if any(map(narrows, bodies)):
            return True
        is_work = not bodies and eqn.primitive.name not in _MOVES
        if is_work and any(_is_narrow(var.aval) for var in eqn.outvars):
            return True
    return False


# fmt: off
_MOVES = frozenset(
    (
        "broadcast_in_dim", "concatenate", "copy", "copy_p", "dynamic_slice",
        "dynamic_update_slice", "empty2", "expand_dims", "gather", "get", "optimization_barrier",
        "pad", "pvary", "reshape", "rev", "select_n", "slice", "split", "squeeze", "swap",
        "transpose", "unstack",
    )
)
# fmt: on


def _is_narrow(aval: Any) -> bool:
    finfo: Any = jnp.finfo
    has_type = getattr(aval, "dtype", None) is not None
    return has_type and _is_real(aval) and bool(finfo(aval.dtype).nexp < _EXPONENT_BITS)


_EXPONENT_BITS = 8  # of float32


def keep_params_in(module: nnx.Module, dtype: Any) -> None:
    """Cast a module's parameters of real floats where they lie, one after the other."""
    if dtype is None:
        return
    for _, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        variable.set_value(jax.tree.map(lambda x: _cast(x, dtype), variable.get_value()))


def _cast(x: Any, dtype: Any) -> Any:
    if not _is_real(x) or x.dtype == dtype:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
    return jax.jit(lambda x: x.astype(dtype), out_shardings=x.sharding)(x)


def _is_real(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
