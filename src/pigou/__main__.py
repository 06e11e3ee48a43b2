"""`python -m pigou` is `pigou`."""

from pigou.cli import main

main()
