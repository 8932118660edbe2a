"""`python -m fedpmt`."""

from fedpmt.cli import main

main()
