"""The version, apart from the front door: records state it."""

__version__ = "0.1.0"
