"""``python -m server``: the ``latentkv`` command."""

from server.cli import main

main()
