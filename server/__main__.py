"""``python -m server``: the ``latentkv`` command."""

import sys

from server.standard import prepare

prepare(sys.argv[1:])

from server.cli import main  # noqa: E402  (takes a second, in which signals may come)

main()
