"""One module per data set, each ending in its description (`DATASET`); `fedpmt.data.registry` finds them."""
