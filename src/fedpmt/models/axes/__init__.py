"""Which channels of a model go together, so that it can be cut by width."""

from fedpmt.models.axes.declared import chain_axes, declared_axes
from fedpmt.models.axes.finding import traced_axes
from fedpmt.models.axes.fitting import fit_attributes

__all__ = ["chain_axes", "declared_axes", "fit_attributes", "traced_axes"]
