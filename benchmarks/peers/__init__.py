"""One file per simulator. Each is run by that simulator's own python and speaks through `common`."""
