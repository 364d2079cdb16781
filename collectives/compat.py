"""All code that depends on a release of JAX or flax, or on their private names.

Checked on jax 0.10.2 and 0.12. Each use says in which releases it was seen and what would take its
place. Classes are imported and not known by their names, so that a release without one fails here,
at once; errors, which have a text alone, are provoked by `tests/unit_collectives/test_compat.py`.

*Varying* is shard_map's word: a value varies over a mesh axis when ranks along that axis may hold
different ones. JAX tracks this in the type of every array inside `jax.shard_map(...,
check_vma=True)` and inserts the reductions of gradients from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import partial_eval
from jax.sharding import NamedSharding, PartitionSpec

# Private, seen from 0.10.2 to 0.12.0. `jax.extend` has no effects; were they there, or did an
# equation say of itself that it may be repeated, these would go.
from jax._src.callback import IOEffect, OrderedIOEffect  # isort: skip
from jax._src.debugging import OrderedDebugEffect  # isort: skip
from jax._src.core import NamedAxisEffect  # isort: skip
from jax._src.state.types import AccumEffect, ReadEffect, WriteEffect  # isort: skip

# Private, seen from 0.10.2 to 0.12.0: an error of `checkify` with a text of its own has no public
# base class.
from jax._src.checkify import ErrorEffect, JaxException  # isort: skip

# Private, seen from 0.10.2 to 0.12.0: what the equation of a `jit` without shardings has in their
# place. A public predicate would take its place.
from jax._src.named_sharding import UnspecifiedValue  # isort: skip

# Private, seen from 0.10.2 to 0.12.0: the coordination service's client and this process's number,
# and who finds the cluster around. A public key-value store, and a public way to ask which process
# this is without connecting, would take their place.
from jax._src.clusters import ClusterEnv  # isort: skip
from jax._src.distributed import global_state  # isort: skip

Axes = str | tuple[str, ...]
Tree = TypeVar("Tree")

# With jax 0.10.2 refs that are differentiated, or belong to a function that JAX is not to take
# apart, get torn; with 0.12 they are not (0.11 was not tried). Goes with the last jax of Python
# 3.11, and most of `pipeline.core.autodiff.in_place` with it.
REFS_ARE_WHOLE = jax.__version_info__ >= (0, 12)

HOST_MEMORY = "pinned_host"  # jax's name of the memory of a device's host

CheckError = JaxException  # the base class of what a failed check raises

_HARMLESS = NamedAxisEffect, ReadEffect, WriteEffect, AccumEffect
_ONCE = IOEffect, OrderedIOEffect
# Of reverse mode through the kernel's refs, seen in 0.10.2 and in 0.12.0. A public class of such
# errors would take their place.
_OF_REFS = "AbstractRef", "Linearization failed"


# --- varying types ---


def varying_axes(x: jax.typing.ArrayLike) -> frozenset[str]:
    """The manual mesh axes over which one array varies; empty outside shard_map."""
    # `.vma`, which carried this up to jax 0.9, is gone from 0.10 on.
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def varying_in(aval: Any, otherwise: Any = ()) -> Any:
    """The manual mesh axes over which values of a type vary, sorted; of an array, of its type.

    Args:
      aval: a type or an array.
      otherwise: the answer where the type does not say.
    """
    aval = jax.typeof(aval) if isinstance(aval, jax.Array) else aval
    found = getattr(aval, "manual_axis_type", None)
    return otherwise if found is None else tuple(sorted(found.varying))


def manual_axes(axes: Axes) -> tuple[str, ...]:
    """List the axes that the surrounding shard_map is manual over, in the order given.

    Empty outside shard_map; an axis that shard_map leaves to the compiler (auto) drops out.

    Raises:
      ValueError: inside shard_map, an axis that the mesh does not have.
    """
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return ()
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown:
        raise ValueError(
            f"axes={axes!r}: the mesh has no axis {unknown[0]!r}; its axes are "
            f"{', '.join(map(repr, mesh.axis_names))}"
        )
    return tuple(name for name in names if name in mesh.manual_axes)


def tracks_varying(axis: str) -> bool:
    """Tell whether the surrounding shard_map over `axis` runs with `check_vma=True`."""
    # pcast costs nothing at run time, and under check_vma=False leaves the type as it was.
    return axis in varying_axes(jax.lax.pcast(jnp.zeros(()), axis, to="varying"))


def vary(tree: Tree, axes: Axes) -> Tree:
    """Mark every leaf as varying over `axes`; the values stay as they are.

    Loop carries, `lax.cond` branches and `jax.new_ref` contents must agree on the axes they vary
    over. `jax.lax.pcast` raises on an axis that an array already varies over; this adds only those
    that are missing. Does nothing outside shard_map, and for axes left to the compiler.

    The transpose is a sum: the gradient of a value that was replicated before `vary` is the total
    over the ranks that used it.

    Args:
      tree: arrays of any shape and dtype.
      axes: a mesh axis or several.

    Raises:
      ValueError: inside shard_map, an axis that the mesh does not have.
    """
    wanted = manual_axes(axes)

    def one(x: jax.typing.ArrayLike) -> jax.typing.ArrayLike:
        have = varying_axes(x)
        missing = tuple(axis for axis in wanted if axis not in have)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(one, tree)


def typed_as(aval: Any, others: Sequence[Any]) -> Any:
    """The type of an array, varying as the one of `others` that varies over most axes."""
    widest = max(others, key=lambda o: len(o.manual_axis_type.varying))
    spec = PartitionSpec(*(None,) * len(aval.shape))
    where = NamedSharding(widest.sharding.mesh, spec)
    return aval.update(sharding=where, manual_axis_type=widest.manual_axis_type)


def is_on_host(aval: Any) -> bool:
    """Tell whether a type, or a traced value, is in host memory; jax 0.10.2 to 0.12."""
    # A traced value's own attribute raises ValueError from 0.12 on.
    aval = jax.typeof(aval) if isinstance(aval, jax.Array) else aval
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def to_host(x: jax.Array) -> jax.Array:
    """A traced array, put into host memory; `jax.memory` has no stable release yet."""
    return jax.device_put(x, jax.memory.Space.Host)


def to_device(x: jax.Array) -> jax.Array:
    """A traced array, put into device memory."""
    return jax.device_put(x, jax.memory.Space.Device)


def put_on_host(x: Any) -> Any:
    """Move an array, traced or not, to the host memory of its devices."""
    if isinstance(x, jax.core.Tracer):
        return to_host(x)
    return jax.device_put(x, x.sharding.with_memory_kind(HOST_MEMORY))


def on_device(tree: Tree) -> Tree:
    """The tree with traced arrays in host memory put into device memory."""

    def one(x: Any) -> Any:
        return to_device(x) if isinstance(x, jax.core.Tracer) and is_on_host(x) else x

    return jax.tree.map(one, tree)


def has_host_memory(devices: Iterable[jax.Device]) -> bool:
    """Tell whether programs for these devices can keep arrays in host memory.

    Described devices, and those of other processes, cannot be asked; TPUs and GPUs can.
    """
    for device in devices:
        try:
            kinds = [memory.kind for memory in device.addressable_memories()]
        except (NotImplementedError, RuntimeError, ValueError, AttributeError):
            kinds = []
        # Devices of other hosts list none.
        known = HOST_MEMORY in kinds if kinds else device.platform in ("tpu", "gpu", "cuda", "rocm")
        if not known:
            return False
    return True


def typeless(aval: Any) -> Any:
    """The type of an array, varying over nothing."""
    return aval.update_manual_axis_type(jax.typeof(0.0).manual_axis_type)


def untyped() -> AbstractContextManager[None]:
    """A context in which nothing asks for varying types, as in shard_map with `check_vma=False`.

    Private to JAX, seen in 0.10.2 and 0.12: there is no public way to trace a Pallas kernel within
    a shard_map that tracks types, unless its author wrote down the types of its results. A
    `jax.shard_map(..., check_vma=False)` that may stand inside another over the same axes would
    take the place of this, and of most of `collectives.local`.
    """
    from jax._src import config

    context: AbstractContextManager[None] = config._check_vma(False)  # noqa: SLF001
    return context


# --- platforms ---


def platform() -> str:
    """Return the platform of the current trace, "cpu", "gpu" or "tpu"; from the mesh if any.

    The devices of a mesh may be described and not there, while this process has others.
    """
    # Devices that a mesh knows of have been an attribute of abstract meshes since jax 0.6.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else str(device.platform)


def is_gpu() -> bool:
    """Tell whether GPUs are traced for, which may be described."""
    # Described ones are called by their runtime.
    return platform() in ("gpu", "cuda", "rocm")


def device_kind() -> str:
    """Return the device kind of the current trace, such as "TPU v6 lite"; from the mesh if any."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return str((device or jax.devices()[0]).device_kind)


def has_cudnn() -> bool:
    """Tell whether this process can call cuDNN. Private to JAX, seen in 0.10.2 and 0.12.

    `jax.nn.dot_product_attention(implementation="cudnn")` raises where it is not; a function that
    says so beforehand would take the place of this.
    """
    from jax._src.lib import cuda_versions

    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # the library is not installed
        return False


# --- jaxprs ---


def loop_sizes(eqn: Any) -> tuple[int, int]:
    """Return the number of constants of a `scan`, and the number of its carried values.

    Up to 0.11 they are parameters, in 0.12 lengths of trees. What would take its place is a
    reader of a scan's equation in `jax.extend`.
    """
    if "num_carry" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = map(list, eqn.params["ft_in"].unpack())
    return len(consts), len(carry)


def called(eqn: Any) -> Any:
    """The jaxpr that the equation of a call runs.

    Under `jax_remat3` and `jax_custom_vjp3`, and in `jax.experimental.hijax`, a call is an object
    that says by a method what it does; seen in 0.12.0. (In 0.10.2 JAX itself fails under these
    flags, in transposing a slice within `jax.checkpoint`: nothing here is tried with them there.)
    What would take its place is `jaxprs_in_params` of `jax.extend` that knows such objects.
    """
    params = eqn.params
    if "_prim" not in params:
        return params["jaxpr" if "jaxpr" in params else "call_jaxpr"]
    types = [var.aval for var in eqn.invars]
    return jax.make_jaxpr(lambda *given: eqn.primitive.to_lojax(*given, **params))(*types)


def lowers_what_it_holds(primitive: Primitive) -> None:
    """Say of a primitive with a jaxpr in its parameters that its lowering traces that again.

    JAX asks a primitive that holds calls as above (see `called`) for another rule beside its
    lowering, by a method that is private; seen in 0.12.0, without effect in 0.10.2.
    """
    primitive.is_high = lambda *_, **__: False  # type: ignore[method-assign]


def custom_vjp(
    f: Callable[..., Any],
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    nondiff_argnums: tuple[int, ...],
) -> Callable[..., Any]:
    """A `jax.custom_vjp` whose forward rule knows, by symbolic zeros, the differentiated arguments.

    With `jax_custom_vjp3`, seen in 0.12.0, `jax.checkpoint` says of all operands that they are,
    unless it shall call the function for the second time and not its rule. How to ask for this is
    private, and refused without that flag; a `jax.checkpoint` that says which operands are
    differentiated would take its place.
    """
    plain, called_again = (jax.custom_vjp(f, nondiff_argnums) for _ in range(2))
    for function in (plain, called_again):
        function.defvjp(forward, backward, symbolic_zeros=True)
    called_again.optimize_remat = True

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        is_new = jax.__version_info__ >= (0, 12) and getattr(jax.config, "jax_custom_vjp3", True)
        return (called_again if is_new else plain)(*args)

    return call


def fixes_shardings(eqn: Any) -> bool:
    """Tell whether the equation of a `jit` fixes shardings of operands or results."""
    params = eqn.params
    fixed = (*params.get("in_shardings", ()), *params.get("out_shardings", ()))
    return not all(isinstance(sharding, UnspecifiedValue) for sharding in fixed)


def live(jaxpr: Any, *, keep_inputs: bool) -> tuple[Any, list[bool]]:
    """A jaxpr without the equations that lead nowhere, and which of its inputs lead somewhere.

    `jax.interpreters` is public and said to be internal; seen from 0.10.2 to 0.12.0. Dead code
    elimination in `jax.extend` would take its place.

    Args:
      jaxpr: any.
      keep_inputs: whether those that lead nowhere stay inputs.
    """
    wanted = [True] * len(jaxpr.outvars)
    found, used = partial_eval.dce_jaxpr(jaxpr, wanted, instantiate=keep_inputs)
    return found, list(used)


def without_refs(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays whose mutable buffers (`jax.new_ref`) have become values.

    A write to a ref returns nothing, and who takes a jaxpr apart by what equations return leaves
    it out. Values in place of refs can be taken apart, and differentiated: JAX's own derivatives of
    refs that are made in the body of a loop are wrong in 0.10.2 and in 0.12.0.

    How a jaxpr's refs are discharged is private, seen in 0.10.2 and 0.12.0; a public function in
    `jax.ref` would take its place.
    """

    @functools.wraps(f)
    def call(*args: Any) -> Any:
        closed, like = jax.make_jaxpr(f, return_shape=True)(*args)
        leaves = jaxpr_as_fun(discharged(closed))(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(like), leaves)

    return call


def discharged(closed: Any) -> Any:
    """Replace the refs that a closed jaxpr makes by values, as `without_refs` returns it."""
    from jax._src.state.discharge import discharge_state

    return discharge_state(closed, lower=False)  # with its custom derivatives


# --- effects and errors ---


def has_effect(effects: Iterable[Any]) -> bool:
    """Tell whether there is an effect other than effects of refs and mesh axes, such as a print."""
    return not all(isinstance(effect, _HARMLESS) for effect in effects)


def may_not_repeat(effects: Iterable[Any]) -> bool:
    """Tell whether there is an effect of `io_callback`, whose callers count its calls."""
    return any(isinstance(effect, _ONCE) for effect in effects)


def is_ordered(effects: Iterable[Any]) -> bool:
    """Tell whether there is one of a callback with ``ordered=True``, which runs on one device
    alone.
    """
    return any(isinstance(effect, OrderedIOEffect | OrderedDebugEffect) for effect in effects)


def has_check(effects: Iterable[Any]) -> bool:
    """Tell whether a check of `checkify` is among them."""
    return any(isinstance(effect, ErrorEffect) for effect in effects)


def is_of_refs(error: Exception) -> bool:
    """Tell whether an error is JAX's, of reverse mode through a function that writes to refs."""
    return any(text in str(error) for text in _OF_REFS)


def renamed_errors(
    error: checkify.Error, where: Sequence[Any], rename: Callable[..., Any]
) -> checkify.Error:
    """Split an error of `checkify` into one exception per failed check.

    How an error is flattened is private, seen from 0.10.2 to 0.12.0. A way to map over the
    exceptions of a `checkify.Error` would take its place.

    Args:
      error: what `checkify.checkify` returned.
      where: int32 scalars that the exceptions hold too.
      rename: makes an exception of ``where`` and the check's own; it flattens to both.
    """
    (failed, codes, payloads), kinds = error.tree_flatten()
    types = tuple(jax.ShapeDtypeStruct((), jnp.int32) for _ in where)
    names = {
        effect: ErrorEffect(effect.error_type, (*types, *effect.shape_dtypes)) for effect in failed
    }

    def wrapped(kind: Any) -> Any:
        of_check = jax.tree.unflatten(kind, [0] * kind.num_leaves)
        return jax.tree.structure(rename((0,) * len(where), of_check))

    return checkify.Error(
        {names[effect]: value for effect, value in failed.items()},
        {names[effect]: code for effect, code in codes.items()},
        {code: wrapped(kind) for code, kind in kinds.items()},
        {names[effect]: [*where, *leaves] for effect, leaves in payloads.items()},
    )


# --- processes ---


def coordination() -> tuple[Any, int]:
    """The client of jax's coordination service, and the number of this process."""
    return global_state.client, global_state.process_id


def find_cluster(*known: Any, seconds: int) -> tuple[Any, ...]:
    """(coordinator, processes, process, local devices) of the cluster around, None if unknown.

    Args:
      known: coordinator, processes and process; what is not None is not looked for.
      seconds: that jax may wait for a name service.
    """
    find: Any = ClusterEnv.auto_detect_unset_distributed_params
    return tuple(find(*known, None, None, seconds))


def trace_context() -> Any:
    """The settings that JAX's caches of traces depend on: precision, 64 bits, promotion."""
    from jax._src import config

    return config.trace_context()


def lower_without_devices(traced: jax.stages.Traced, platform: str) -> jax.stages.Lowered | None:
    """Lower a function of an abstract mesh, to compile for any devices; None if devices are needed.

    A callback does, whose lowering names the device that calls back.
    """
    try:
        return traced.lower(lowering_platforms=(platform,))
    except ValueError as error:
        if "AbstractMesh cannot be used" not in str(error):
            raise
        return None
