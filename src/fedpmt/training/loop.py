"""The one local loop, for devices and for a server that trains, and the one maker of replies."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedpmt import kernels
from fedpmt.data.lazy import Lazy
from fedpmt.models.layered import PREFIX_BATCH
from fedpmt.models.precision import Prefix, computing
from fedpmt.models.trees import map_tensors, tensors_in, weights_sha256
from fedpmt.parts.part import GLOBAL, Mask, frozen_prefix, left_out, mask, place, take, within
from fedpmt.training.batches import augmented
from fedpmt.training.kept import PREFIX, outputs_made_of
from fedpmt.training.local import Job, LocalSettings, LocalWork, Run
from fedpmt.training.messages import UPDATE, Reply
from fedpmt.training.optimizers import clip
from fedpmt.training.privacy import NOISE
from fedpmt.types import MODEL, Examples, SettingError

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from fedpmt.models.layered import LayeredModel
    from fedpmt.models.structure import Structure
    from fedpmt.parts.part import Part
    from fedpmt.training.local import Site
    from fedpmt.training.messages import Task
    from fedpmt.types import Arrays, Tensors

LOSS = "train_loss"


def forward_pass(
    site: Site, model: LayeredModel, first: int | None = None
) -> Callable[[Tensors, Arrays], Any]:
    """Give the forward pass, whole or from layer `first` on: compiled where that may be and the model is known."""
    if site.fast and site.settings.lowered is None and model.composable:
        return kernels.differentiable(model, first or 0)
    return model.forward if first is None else partial(model.suffix, first)


def evaluate_model(model: LayeredModel, tensors: Tensors, inputs: Arrays) -> Tensor:
    """The outputs of any model, in evaluation mode; compiled code's where it knows the model."""
    outputs = kernels.forward(model, tensors, inputs)
    if outputs is None:
        model.set_training([False] * len(model.structure.layers))
        outputs = model.forward(tensors, inputs)
    return outputs


def local_tensors(task: Task, part: Part, structure: Structure) -> dict[str, Tensor]:
    """The received weights as the device works with them."""
    received = task.tensors[MODEL]
    masked = {name: one for name, one in part.sent.items() if isinstance(one, Mask)}
    return {name: received[name] for name in part.sent} | {
        name: place(received[name], one, structure.shapes[name]) for name, one in masked.items()
    }


def begin(
    job: Job[Any],
    *,
    part: Part | None = None,
    tensors: Tensors | None = None,
    frozen_norms: bool = False,
    first: int = 0,
) -> Run[Any]:
    """Set up a run on what the device was sent; or on another part and tensors, where it keeps some of its own.

    With `first`, the data are not samples but what enters layer `first`.
    """
    part, model = part or job.part, job.model
    structure = model.structure
    local = local_tensors(job.task, part, structure) if tensors is None else tensors
    trained = [bool(on) for on in mask(structure, part)]
    model.set_training(trained, norms=not frozen_norms, left_out=left_out(structure, part))
    # In the order of the forward pass, so that gradients are always taken in one order.
    params = {
        name: local[name].clone().requires_grad_() for name in structure.parameters if name in part.trained
    }
    # The forward pass writes to the buffers of layers in training mode, whether they are sent back or not.
    buffers = set(structure.buffers)
    fixed = {
        name: tensor.clone() if name in buffers else tensor
        for name, tensor in local.items()
        if name not in params
    }
    fixed |= model.local_buffers()
    if first:
        return Run(job, part, params, fixed, job.data, job.site.forward(model, first))
    data, forward = split_forward(job, model, part, local)
    return Run(job, part, params, fixed, data, forward)


def split_forward(
    job: Job[Any], model: LayeredModel, part: Part, received: Tensors
) -> tuple[Examples, Callable[[Tensors, Arrays], Any]]:
    """Cut the forward pass before the first trained layer: no graph exists for what is frozen.

    With `cache` the frozen prefix sees each sample once per round, in large batches; its activations
    cannot change while its weights, those `received`, do not. What the base makes of the samples, before the first
    layer, may be kept for the whole run, as nobody trains it; what frozen layers make of them, until these have moved.
    """
    site, data = job.site, job.data
    settings, frozen = site.settings, frozen_prefix(model.structure, part)
    if not model.can_cut(frozen):
        # Frozen tensors require no gradient, so autograd builds no graph before the first trained layer.
        return data, site.forward(model)
    suffix, base = site.forward(model, frozen), None
    if settings.keeps_base and part.model == GLOBAL:
        base = Prefix.of(model, 0, {}, settings.frozen_precision)
        compute = partial(_keep_whole, base, data)
        outputs = compute() if site.kept is None else site.kept.get(job.device, compute)
        data = Examples(base.entry(outputs, data.inputs), data.targets, data.ids)
        if frozen == 0:
            return data, partial(_restored, suffix, replace(base, tensors={}))
    streamed = settings.prefix == "streamed"
    prefix = Prefix.of(model, frozen, received, settings.frozen_precision, base, streamed=streamed)
    names = outputs_made_of(model, part) if settings.reuses_prefix else ()
    if settings.prefix == "recompute" or not (streamed or names or sees_all(job)):
        return data, lambda tensors, inputs: suffix(tensors, prefix.enter(inputs))
    if names and site.kept is not None:
        digest = weights_sha256({name: received[name] for layer in names for name in layer})
        outputs = site.kept.get(job.device, partial(_keep_whole, prefix, data), digest, PREFIX)
    else:
        outputs = keep(prefix, data.inputs, len(data))
    kept = Examples(prefix.entry(outputs, data.inputs), data.targets, data.ids)
    # Without the weights: rounded ones would be held for the whole round.
    return kept, partial(_restored, suffix, replace(prefix, tensors={}))


def sees_all(job: Job[Any]) -> bool:
    """Whether a device is asked for enough steps to see all of its samples: else keeping outputs saves nothing."""
    return job.task.steps is None or job.task.steps * job.site.settings.batch >= len(job.data)


def _restored(
    suffix: Callable[[Tensors, Arrays], Any], prefix: Prefix, tensors: Tensors, entry: Arrays
) -> Any:
    return suffix(tensors, prefix.restore(entry))


def keep(prefix: Prefix, inputs: Arrays, count: int) -> Arrays:
    """Run frozen layers on all samples, some at a time, and keep what the others need of them.

    Where they are streamed, each block of layers runs on all samples before the next one does.
    """
    spans = [slice(start, start + PREFIX_BATCH) for start in range(0, count, PREFIX_BATCH)]
    between: list[Arrays | None] = [None] * len(spans)
    for block in prefix.blocks():
        if block.final:
            return _join(block, inputs, count, spans, between)
        for number, span in enumerate(spans):
            between[number] = block.run(_rows(inputs, span), between[number])
        del block  # with its weights, before those of the next one are loaded
    raise RuntimeError("the last block of frozen layers must be final")


def _join(
    block: Prefix, inputs: Arrays, count: int, spans: list[slice], between: list[Arrays | None]
) -> Arrays:
    kept = block.run(_rows(inputs, spans[0]), between[0])
    between[0] = None
    if len(spans) > 1:
        # Written to their place: to join them at the end would take all of them twice.
        first = kept
        kept = map_tensors(first, lambda one: one.new_empty(count, *one.shape[1:]))
        _write(kept, spans[0], first)
        del first
        for number, span in enumerate(spans[1:], start=1):
            _write(kept, span, block.run(_rows(inputs, span), between[number]))
            between[number] = None
    return kept


def _keep_whole(prefix: Prefix, data: Examples) -> Arrays:
    # In one layout, whether they were just made or come from a file.
    return map_tensors(keep(prefix, data.inputs, len(data)), lambda one: one.contiguous())


def _rows(inputs: Arrays, span: slice) -> Arrays:
    return map_tensors(inputs, lambda one: one[span])


def _write(kept: Arrays, span: slice, values: Arrays) -> None:
    for whole, some in zip(tensors_in(kept), tensors_in(values), strict=True):
        whole[span] = some


def train(work: LocalWork[Any], job: Job[Any]) -> tuple[Reply, Any]:
    """A device's local round: its reply, and what it keeps."""
    run, loss = compiled_round(work, job) or local_round(work, job)
    return conclude(work, run, loss)


def compiled_round(work: LocalWork[Any], job: Job[Any]) -> tuple[Run[Any], float] | None:
    """The whole local round in one compiled call; None where it must be done step by step."""
    settings, structure = job.site.settings, job.model.structure
    known = settings.precision == settings.frozen_precision == "fp32" and job.site.objective.plain
    known = known and settings.transform is None and not isinstance(job.data, Lazy)
    rule = work.compiled(job) if job.site.fast and known else None
    if rule is None:
        return None
    received = local_tensors(job.task, job.part, structure)
    # Where nobody looks at the new weights, all that is asked for is what goes back.
    changes = type(work).reply is LocalWork.reply
    order = job.rng("order")
    orders = np.stack([order.permutation(len(job.data)) for _ in range(settings.epochs)])
    found = kernels.train(
        job.model,
        job.part,
        received,
        job.data,
        orders,
        batch=settings.batch,
        limit=job.task.steps,
        cached=settings.prefix != "recompute" and sees_all(job),
        rule=rule,
        changes=changes,
    )
    if found is None:
        return None
    tensors, loss, steps = found
    if changes:
        return Run(job, job.part, {}, {}, job.data, _no_forward, steps, changes=tensors), loss
    return Run(job, job.part, tensors, {}, job.data, _no_forward, steps, trained=tensors), loss


def why_not_compiled(work: LocalWork[Any], job: Job[Any]) -> str | None:
    """What keeps a local round from compiled code that knows the model; None where it does not know it."""
    if isinstance(job.data, Lazy):
        return None  # a model is known by inputs that are there
    if not kernels.knows(job.model, job.data.inputs):
        return None
    if job.site.settings.transform is not None:
        return "a transform of batches"
    if job.site.settings.lowered is not None:
        return job.site.settings.lowered
    if work.compiled(job) is None:
        return "its local steps with these settings"
    if not job.site.objective.plain:
        return "this loss"
    return f"parts like '{job.part.label}'"


def _no_forward(tensors: Tensors, inputs: Arrays) -> Tensor:
    raise RuntimeError("compiled code has trained this run: it has no forward pass")


def local_round(work: LocalWork[Any], job: Job[Any]) -> tuple[Run[Any], float]:
    """E epochs of mini-batch steps on the trained tensors (equation 6 of the paper), and the mean loss."""
    run, settings = work.start(job), job.site.settings
    run.stepper = stepper = (run.optimizer or settings.optimizer).start(run.moments)
    limit = settings.steps(len(job.data), job.task.steps) if run.params else 0
    order, transform = job.rng("order"), settings.transform
    drawn = None if transform is None else _torch_generator(job.rng("transform"), job.model.device)
    total = 0.0
    for _ in range(settings.epochs):
        positions = order.permutation(len(job.data))
        for start in range(0, len(job.data), settings.batch):
            if run.steps >= limit:
                break
            batch = run.data.take(positions[start : start + settings.batch])
            if transform is not None and drawn is not None:
                batch = augmented(transform, batch, drawn)
            with computing(settings.precision, batch.inputs):
                loss = work.loss(run, batch)
            found = torch.autograd.grad(loss, list(run.params.values()), allow_unused=True)
            # What the loss does not depend on, such as an expert nobody chose, keeps its bits.
            known = {name: one for name, one in zip(run.params, found, strict=True) if one is not None}
            gradients = work.correct(run, known)
            rate = settings.learning_rate if run.rate is None else run.rate(run.steps)
            stepper.step(run.params, clip(gradients, settings.clip_norm), rate, run.corner)
            run.steps += 1
            total += float(loss.detach())
            # Else the next step's batch and gradients would be made while these are still held.
            del batch, found, known, gradients, loss
    return run, total / max(1, run.steps)


def _torch_generator(rng: np.random.Generator, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(int(rng.integers(2**63)))


def conclude(work: LocalWork[Any], run: Run[Any], loss: float) -> tuple[Reply, Any]:
    """Make the reply: what training changed of the entries that are sent back, and what the work adds to it."""
    job, privacy = run.job, run.job.site.settings.privacy
    outcome, own = work.reply(run)
    part = job.part
    update = dict(run.changes) if run.changes is not None else _changes(run)
    metrics = {LOSS: loss, **outcome.metrics}
    if privacy is not None:
        if outcome.tensors or outcome.scalars:
            # Neither clipped nor noised: rather no reply than one that tells what was promised not to be told.
            more = ", ".join(sorted({*outcome.tensors, *outcome.scalars}))
            raise SettingError(
                f"dp-clip does not protect what {type(work).__name__} sends in addition: {more}"
            )
        update, metrics = privacy.protect(update, job.rng(NOISE)), {}
    tensors = {UPDATE: update, **outcome.tensors}
    return Reply(job.device, job.round, part, len(job.data), tensors, outcome.scalars, metrics), own


def _changes(run: Run[Any]) -> dict[str, Tensor]:
    """w_k - w of every trained entry, in the form in which it travels."""
    job, part, after = run.job, run.job.part, run.trained
    received = local_tensors(job.task, part, job.model.structure)
    where = {name: within(selection, part.sent[name]) for name, selection in part.trained.items()}
    if after is None:
        own = run.tensors
        after = {name: take(own[name].detach(), selection) for name, selection in where.items()}
        job.model.release()
    return {name: after[name] - take(received[name], selection) for name, selection in where.items()}


def train_on_server(
    work: LocalWork[Any],
    job: Job[Any],
    *,
    steps: int,
    rate: float,
    batch: int | None = None,
) -> tuple[Run[Any], float]:
    """Take steps by the one local loop, over the data as often as it takes: the finished run and its mean loss."""
    batch = batch or job.site.settings.batch
    epochs = -(-steps // -(-len(job.data) // batch))
    site = replace(job.site, settings=LocalSettings(epochs, batch, rate, prefix="recompute"))
    return local_round(work, replace(job, site=site, task=replace(job.task, steps=steps)))
