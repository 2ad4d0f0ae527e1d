"""`python -m graphdecode`."""

from graphdecode.cli import main

main()
