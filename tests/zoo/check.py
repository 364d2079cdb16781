"""Training of a pipeline made by `split` against training of the plain model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from collectives import make_mesh
from pipeline import Pipeline, make_optimizer, split
from pipeline.training.checkpoints import Checkpoints
from tests.zoo.entry import Case, Entry

MICROBATCHES = 4
EXACT, TIMES, COARSE = 1e-5, 3.0, 1e-3
# Adam's first step divides a gradient by itself: where a gradient is zero but for rounding, a small
# eps would make a full step of the rounding.
ADAMW = optax.adamw(1e-2, eps=1e-2)
# stages, ranks
CUTS = {"1f1b": (2, 2), "zb_h1": (4, 4), "interleaved_1f1b": (4, 2)}


def distance(found: Any, wanted: Any, unused: tuple[str, ...] = ()) -> float:
    """Largest difference, over the largest entry of the array or a hundredth of the tree's.

    Raises:
      AssertionError: if the trees do not have the same leaves, apart from unused parameters.
    """
    found, wanted = (dict(nnx.to_flat_state(tree)) for tree in (found, wanted))
    missing = {".".join(map(str, path)) for path in set(wanted) - set(found)}
    assert missing <= set(unused), missing
    assert not set(found) - set(wanted)
    arrays = {path: np.asarray(wanted[path][...], np.float64) for path in found}
    floor = 1e-2 * max(np.abs(one).max() for one in arrays.values())
    return max(
        float(
            np.abs(np.asarray(found[path][...], np.float64) - one).max()
            / max(np.abs(one).max(), floor)
        )
        for path, one in arrays.items()
    )


class Plain:
    """The plain model, its optimizer and one compiled step."""

    def __init__(self, entry: Entry, case: Case) -> None:
        self.entry, self.case = entry, case
        self.model = nnx.clone(case.model)
        self.optimizer = nnx.Optimizer(self.model, ADAMW, wrt=entry.wrt)
        self.step = nnx.jit(self._step)
        self.gradients = nnx.jit(self._gradients, static_argnums=3)

    def _gradients(self, model, args, targets, parts):
        case = self.case
        call = case.call or (lambda model, *args: model(*args))

        def loss(model):
            pieces = [
                jax.tree.map(lambda x, k=k: x.reshape(parts, -1, *x.shape[1:])[k], (args, targets))
                for k in range(parts)
            ]
            return sum(case.loss_fn(call(model, *some), t) for some, t in pieces) / parts

        return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, self.entry.wrt))(model)

    def _step(self, model, optimizer, args, targets):
        parts = MICROBATCHES if self.entry.by_microbatch else 1
        loss, grads = self._gradients(model, args, targets, parts)
        optimizer.update(model, grads)
        return loss, grads

    def moved(self) -> float:
        """Distance of its gradients, microbatch by microbatch, from those of the whole batch.

        Both are the model's own in exact numbers: the distance is how far rounding moves them.
        """
        if self.entry.by_microbatch:
            return 0.0
        parts, whole = (
            self.gradients(self.model, self.case.args, self.case.targets, parts)[1]
            for parts in (MICROBATCHES, 1)
        )
        return distance(parts, whole)

    def next(self) -> tuple[float, Any, Any]:
        """Loss, gradients and weights after one more step."""
        loss, grads = self.step(self.model, self.optimizer, self.case.args, self.case.targets)
        return float(loss), grads, jax.device_get(nnx.state(self.model, self.entry.wrt))


class Trained:
    """A pipeline of one schedule, its optimizer and one compiled step."""

    def __init__(self, entry: Entry, case: Case, schedule: str) -> None:
        stages, ranks = CUTS[schedule]
        mesh = make_mesh(stage=ranks)
        if entry.by_mesh:
            case = entry.make(mesh)  # the same weights, from the same seeds
        self.entry, self.case = entry, case
        self.parts = split(case.model, stages, *case.args, call=case.call)
        options = {"loss_fn": case.loss_fn, "mesh": mesh, **dict(entry.pipe)}
        if entry.wrt is not nnx.Param:
            options["wrt"] = entry.wrt
        self.pipe = Pipeline(
            **self.parts, num_microbatches=MICROBATCHES, schedule=schedule, **options
        )
        self.optimizer = make_optimizer(self.pipe, ADAMW)
        self.step = nnx.jit(self._step)

    @staticmethod
    def _step(pipe, optimizer, inputs, targets, extras):
        loss, grads = pipe.value_and_grad(inputs, targets, extras=extras)
        optimizer.update(pipe, grads)
        return loss, grads

    def plain(self, tree: Any) -> Any:
        """A tree like the pipeline's parameters, under the plain model's paths."""
        return self.parts.from_layers(self.pipe.to_layers(tree))

    def compare(self, wanted: tuple[float, Any, Any]) -> tuple[float, float, float]:
        """Distances of loss, gradients and weights after one more step."""
        inputs, extras = self.parts.inputs(*self.case.args)
        loss, grads = self.step(self.pipe, self.optimizer, inputs, self.case.targets, extras)
        unused = tuple(self.parts.unused)
        weights = nnx.state(self.pipe, self.pipe.wrt)
        return (
            abs(float(loss) - wanted[0]) / abs(wanted[0]),
            distance(self.plain(grads), wanted[1], unused),
            distance(self.plain(weights), wanted[2], unused),
        )


def distances(
    entry: Entry, case: Case, folder: Path
) -> tuple[dict[str, tuple[float, float, float]], float]:
    """Distances of a first step by schedule, and of a second from a checkpoint of another cut.

    The second value is the largest that is allowed: `EXACT`, or `TIMES` the distance by which
    rounding moves the plain model's own gradients, whichever is larger.

    Raises:
      AssertionError: rounding moves them by so much that a comparison would show nothing.
    """
    plain, found = Plain(entry, case), {}
    moved = [plain.moved()]
    wanted = plain.next()
    for schedule in ("1f1b", "zb_h1"):
        trained = Trained(entry, case, schedule)
        found[schedule] = trained.compare(wanted)
        if schedule == "1f1b":
            with Checkpoints(folder) as checkpoints:
                checkpoints.save(1, trained.pipe, trained.optimizer)
            # The second step of both starts at the same weights, to the last bit.
            nnx.update(
                plain.model, jax.device_get(trained.plain(nnx.state(trained.pipe, entry.wrt)))
            )
    restored = Trained(entry, case, "interleaved_1f1b")
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore(restored.pipe, restored.optimizer) == 1
    moved.append(plain.moved())
    found["interleaved_1f1b, restored"] = restored.compare(plain.next())
    assert max(moved) < COARSE, (moved, found)
    return found, max(EXACT, TIMES * max(moved))
