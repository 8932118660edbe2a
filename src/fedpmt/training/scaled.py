"""Local work on a thinned net whose kept activations stand in for the dropped ones."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fedpmt.submodel.part import local_shape
from fedpmt.training.local import LocalWork, Rng, Run, Site
from fedpmt.types import SettingError

if TYPE_CHECKING:
    from torch import Tensor

    from fedpmt.submodel.part import Part
    from fedpmt.training.messages import Task
    from fedpmt.types import Arrays, Examples, Tensors


class ScaledWork(LocalWork[None]):
    """Multiplies each thinned layer's output by n / m (m kept of n), in training only: inverted dropout.

    With exact counts the factor is n / m, not 1 / keep: only then is the next layer's expected input the
    full one.
    """

    def start(self, site: Site, task: Task, part: Part, own: None, data: Examples, rng: Rng) -> Run:
        run = super().start(site, task, part, own, data, rng)
        model = site.models[part.model]
        if not model.composable:
            raise SettingError("feddrop.scaling needs a model that is a chain of its layers")
        factors = []
        for layer in model.structure.layers:
            weight = layer.parameters[0]
            full = model.structure.shapes[weight]
            factors.append(full[0] / local_shape(part.sent[weight], full)[0])

        def forward(tensors: Tensors, inputs: Arrays) -> Tensor:
            hidden = inputs
            for position, factor in enumerate(factors):
                hidden = model.run(position, position + 1, tensors, hidden)
                hidden = hidden if factor == 1 else hidden * factor
            return hidden  # type: ignore[no-any-return]

        return replace(run, forward=forward)
