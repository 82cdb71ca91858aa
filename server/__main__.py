"""`python -m headrace.server` is the command line."""

from headrace.server.cli import main

main()
