"""Rules for the fields of a configuration, and values that follow from them.

Letters: W = devices of all processes, P = processes, D = data shards, M = microbatches, b = rows of
a microbatch on one data shard, N = M * D * b rows of a batch. Each function takes all fields as a
dict, fills in those that follow, and returns what is wrong with them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from collectives import DATA, STAGE, TENSOR
from collectives.places.homes import straddling
from collectives.places.sizes import fitting, in_order, integer, is_size, name_faults, text
from pipeline.base.precision import check_dtype

Fields = dict[str, Any]

DTYPES = ("param_dtype", "compute_dtype", "grad_dtype")
_REQUIRED = (STAGE, TENSOR)
_SIZES = (
    *(STAGE, DATA, TENSOR, "world_size", "num_processes", "devices_per_process"),
    *("num_microbatches", "microbatch_size", "batch_size"),
)


def resolve(fields: Fields) -> list[str]:
    """Fill in what follows, in place; return all faults."""
    faults = [*_types(fields), *_precision(fields)]
    known = sorted({*fields, "devices"} - {"axes"})
    faults += name_faults([name for name, _ in fields["axes"]], known)
    if faults:  # nothing follows from values of a wrong type
        return faults
    rules: tuple[Callable[[Fields], list[str]], ...] = (_world, _processes, _groups, _batch)
    return [fault for rule in rules for fault in rule(fields)]


def sizes_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The axes of the mesh, slowest first; data is None while unknown."""
    own = {name: fields[name] for name in (DATA, STAGE, TENSOR)}
    return in_order({**own, **dict(fields["axes"])})


def unknown_keys(keys: Iterable[Any], known: list[str]) -> list[str]:
    """Word the faults of keys that name no field."""
    faults = []
    for key in keys:
        if key in known:
            continue
        near = difflib.get_close_matches(str(key), known, n=1)
        remedy = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(known)}"
        faults.append(f"unknown key {key!r}; {remedy}")
    return faults


def _types(fields: Fields) -> list[str]:
    """Integers where sizes are due; they become Python's, in place."""
    asked = {name: fields[name] for name in _SIZES}
    asked |= {f"axes[{name!r}]": size for name, size in fields["axes"]}
    faults = []
    for name, value in asked.items():
        optional = name in _SIZES and name not in _REQUIRED
        if not is_size(value) and not (optional and value is None):
            also = ", or None for what follows from the others" if optional else ""
            faults.append(f"{name}={value!r}: must be an integer >= 1{also}")
    own = fields["process_id"]
    process = integer(own)
    if own is not None and (process is None or process < 0):
        faults.append(f"process_id={own!r}: must be an integer >= 0, or None")
    if not faults:
        fields |= {name: integer(fields[name]) for name in (*_SIZES, "process_id")}
        fields["axes"] = tuple((name, integer(size)) for name, size in fields["axes"])
    return faults


def _precision(fields: Fields) -> list[str]:
    """Dtypes by their names; those left open are as the parameters."""
    faults, found = [], {}
    for name in DTYPES:
        given = fields["param_dtype"] if fields[name] is None else fields[name]
        try:
            found[name] = check_dtype(name, given, others="").name
        except ValueError as fault:
            if fields[name] is not None:  # else it is the fault of param_dtype
                faults.append(str(fault))
    fields.update(found)
    return faults


def _world(fields: Fields) -> list[str]:
    """W = D * stage * tensor * further axes."""
    sizes = sizes_of(fields)
    product = math.prod(size for size in sizes.values() if size is not None)
    world, source = fields["world_size"], "world_size"
    if world is None and fields["num_processes"] and fields["devices_per_process"]:
        world = fields["num_processes"] * fields["devices_per_process"]
        source = "num_processes * devices_per_process"
    if world is None:
        world = product
    fields["world_size"] = world
    if sizes[DATA] is None and world % product == 0:
        fields[DATA] = world // product
        return []
    if product == world:
        return []
    given = {name: size for name, size in sizes.items() if size is not None}
    rule = "does not divide" if sizes[DATA] is None else "is not"
    fits = fitting(sizes, world)
    return [
        f"{text(given)}: the product {product} {rule} {source} = {world}; these give it: {fits}"
    ]


def _processes(fields: Fields) -> list[str]:
    """W = P * devices of each; the index of a process lies in 0..P-1."""
    world, count, each = (
        fields[name] for name in ("world_size", "num_processes", "devices_per_process")
    )
    faults = []
    for name, known, other in (
        ("num_processes", each, "devices_per_process"),
        ("devices_per_process", count, "num_processes"),
    ):
        if fields[name] is None and known is not None:
            if world % known:
                faults.append(
                    f"{other}={known}: must divide world_size = {world}, since every process has "
                    f"the same number of devices; use {_divisors_near(world, known)}"
                )
            else:
                fields[name] = world // known
    if count and each and count * each != world:
        faults.append(
            f"num_processes={count} * devices_per_process={each} is {count * each}, but "
            f"world_size = {world}; leave one of the three out"
        )
    return faults + _own_process(fields)


def _own_process(fields: Fields) -> list[str]:
    own, count = fields["process_id"], fields["num_processes"]
    if own is None:
        return []
    if count is None:
        return [f"process_id={own}: says nothing without num_processes; give that too"]
    if own >= count:
        return [f"process_id={own}: num_processes={count} have the indices 0..{count - 1}"]
    return []


def _groups(fields: Fields) -> list[str]:
    """Groups of devices lie evenly in processes."""
    count, each = fields["num_processes"], fields["devices_per_process"]
    sizes = sizes_of(fields)
    if None in (count, each, *sizes.values()) or count * each != math.prod(sizes.values()):
        return []  # said already
    fault = straddling(sizes, each, count)
    return [fault] if fault else []


def _batch(fields: Fields) -> list[str]:
    """N = M * D * b."""
    names = ("num_microbatches", "data", "microbatch_size")
    rows = fields["batch_size"]
    factors = {name: fields[name] for name in names}
    missing = [name for name, value in factors.items() if value is None]
    product = math.prod(value for value in factors.values() if value is not None)
    given = " * ".join(f"{name}={value}" for name, value in factors.items() if value is not None)
    if rows is None:
        if not missing:
            fields["batch_size"] = product
        return []
    if rows % product or (not missing and rows != product):
        near = [n for n in (rows // product * product, -(-rows // product) * product) if n]
        allowed = " or ".join(map(str, near if missing else [product]))
        rule = "must be a multiple of" if missing else "must be"
        return [f"batch_size={rows}: {rule} {given}, {product}; use {allowed}"]
    if len(missing) == 1:
        fields[missing[0]] = rows // product
    return []


def _divisors_near(number: int, wanted: int) -> str:
    """The divisors on either side of a number that is none."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    below = [n for n in divisors if n < wanted][-1:]
    above = [n for n in divisors if n > wanted][:1]
    return " or ".join(map(str, below + above))
