"""The command line. Loads no torch until a command needs it."""

from fedpmt.cli.main import main

__all__ = ["main"]
