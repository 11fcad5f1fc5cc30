"""``python -m attrax`` is the command ``attrax``."""

from attrax.cli import main

main()
