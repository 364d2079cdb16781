"""Warnings about a pipeline's options and stages, given before any model is traced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from collectives import STAGE
from pipeline.base.warn import warn
from pipeline.core.model.objects import differences
from pipeline.core.model.stage import define, is_stacked
from pipeline.core.model.trained import Trained
from pipeline.core.model.trained_filters import Places, trained_parts
from pipeline.core.options.choose import default_ranks, is_path
from pipeline.core.placement.meshes import mesh_in_force, mesh_text
from pipeline.core.placement.paths import Asked
from schedules.core.schedule import Schedule

_FEW_STAGES = 3  # two stages may be meant to differ


def warn_of_idle_devices(schedule: Any, mesh: Mesh, num_stages: int) -> None:
    """Warn of a default mesh that leaves half of the devices or more idle.

    No warning is given if there are fewer stages than devices: then each stage has its own device.

    Args:
      schedule: the user's ``schedule=``; a timetable has its own number of ranks.
    """
    devices, ranks = len(jax.devices()), mesh.shape[STAGE]
    if isinstance(schedule, Schedule) or is_path(schedule):
        return
    if ranks >= num_stages or 2 * ranks > devices:
        return
    most = 2 * max(num_stages, devices)
    ideal = [k for k in range(1, most + 1) if default_ranks(k, devices, schedule) == devices]
    below = [k for k in ideal if k < num_stages][-1:]
    above = [k for k in ideal if k > num_stages][:1]
    counts = " or ".join(map(str, below + above))
    warn(
        f"{num_stages} stages are shared equally by {ranks} of the {devices} devices, and the "
        f"other {devices - ranks} stay idle: every rank holds {num_stages // ranks} stages. "
        f"{counts} stages would use all {devices} (stages need not be alike, so one may hold more "
        f"layers than another); or give mesh=make_mesh(stage={ranks}, data={devices // ranks}), "
        f"whose devices share the rows of a batch, or mesh=make_mesh(stage={ranks}) if this is "
        f"meant",
        UserWarning,
    )


def check_nested(pipeline: type, stages: Any, **ends: Any) -> None:
    """Refuse pipelines within a pipeline's stages, embed or head; ``pipeline`` is their class."""
    parts = {f"stages[{k}]": stage for k, stage in enumerate(stages)} | ends
    for name, part in parts.items():
        if not isinstance(part, nnx.Module):
            continue
        for path, node in nnx.iter_modules(part):
            if isinstance(node, pipeline):
                where = ".".join(map(str, (name, *path)))
                raise ValueError(
                    f"{where} is a Pipeline, and a pipeline lays itself over devices, so it cannot "
                    f"be a part of another: put its stages into the outer one's list "
                    f"(pipe.stages(), pipe.embed, pipe.head)"
                )


def check_stages(stages: Any) -> None:
    """Refuse stages of a model that qwix quantised whole; warn if all differ only in attributes."""
    _check_intercepted(stages)
    _warn_of_attributes(stages)


def _warn_of_attributes(stages: Any) -> None:
    """Warn if all stages have equal arrays but differ in attributes, which is seldom meant."""
    if is_stacked(stages) or len(stages) < _FEW_STAGES:
        return
    if len({define(stage, "")[0] for stage in stages}) < len(stages):
        return
    found = [list(differences(stages[0], stage)) for stage in stages[1:]]
    names = [name for ways in found for name, _ in ways]
    if None in names:
        return
    ways = " and ".join(text for _, text in found[0])
    warn(
        f"stages[1] differs from stages[0] only in {ways}, and so do all {len(stages)} stages from "
        f"each other: each is traced and compiled by itself; if what a stage computes does not "
        f"depend on it, use Pipeline(..., ignore={tuple(dict.fromkeys(names))!r})",
        UserWarning,
    )


def _check_intercepted(stages: Any) -> None:
    """Check that every quantised module is within a module whose class qwix replaced.

    qwix replaces the class of the model that it is given, and quantises only in calls of this
    class. A stage taken out of the model is called without it. Stages with qwix's adapters
    (`nnx.LoRAParam`) are skipped: `pipeline.lint.unread` warns of adapters that no part reads.
    """
    if is_stacked(stages) or any(nnx.to_flat_state(nnx.state(x, nnx.LoRAParam)) for x in stages):
        return
    for k, stage in enumerate(stages):
        modules = [(p, m) for p, m in nnx.iter_graph(stage) if isinstance(m, nnx.Module)]
        called = [path for path, module in modules if hasattr(type(module), "_unquantized_type")]
        for path, module in sorted(modules, key=lambda item: len(item[0])):
            if hasattr(module, "qwix_path") and not any(path[: len(p)] == p for p in called):
                raise ValueError(
                    f"{'.'.join(map(str, (f'stages[{k}]', *path)))} is a part of a model that "
                    f"qwix.quantize_model was given whole, and qwix acts where that model is "
                    f"called, so the stage would compute unquantised: quantise each stage, "
                    f"qwix.quantize_model(stage, provider, x), or split the quantised model with "
                    f"pipeline.split"
                )


def warn_of_no_names(sharding: Asked | None) -> None:
    """Warn of a ``sharding`` function that has named no axes for any weight."""
    if sharding is None or sharding.answers or not sharding.paths:
        return
    first, last = sharding.paths[0], sharding.paths[-1]
    paths = f"{first!r}" if first == last else f"{first!r} and {last!r}"
    warn(
        f"sharding= returns None for all {len(sharding.paths)} variables, so it shards "
        f"nothing; it is called with paths of the plain model, as wrt= and state= are, here of "
        f"{paths}; correct it, or leave it out where the metadata of weights name their axes"
    )


def warn_of_frozen_parts(trained: Trained, chunks: Sequence[nnx.Module], stages: Places) -> None:
    """Warn if ``wrt`` freezes a part of an array that stages share.

    A plain `nnx.Optimizer` may change the frozen part by weight decay.
    """
    parts = trained_parts(trained, chunks, stages)
    if parts:
        frozen = [k for k, mask in enumerate(trained.stages) if not any(mask)]
        whose = f"that of stages {', '.join(map(str, frozen))}, " if frozen else ""
        warn(
            f"wrt freezes a part of arrays that stages share, {whose}in {len(parts)} such as "
            f"{next(iter(parts))}; its gradients are zeros, and pipeline.make_optimizer(pipe, tx) "
            f"leaves it as it is, where weight decay in an nnx.Optimizer would change it",
            UserWarning,
        )


def warn_of_untyped_weights(home: Mesh, warned: set[Any]) -> None:
    """Warn once if a mesh is in force whose axis types the pipeline's weights do not have.

    Args:
      home: the pipeline's mesh with the axis types of its state.
      warned: keys of warnings already given; the function adds to it.
    """
    here, key = mesh_in_force(), "untyped weights"
    if here is None or home.explicit_axes or not here.explicit_axes or key in warned:
        return
    warned.add(key)
    warn(
        f"jax.set_mesh has a mesh of {mesh_text(here)}, but this pipeline was made outside of it: "
        f"its weights and gradients have no types, and under jax.set_mesh jax refuses to compute "
        f"with them, as in an optimizer's update; make pipeline and optimizer under jax.set_mesh "
        f"too, or train outside of it"
    )
