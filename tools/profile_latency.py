"""Measure the decode step; the same as `graphdecode profile`."""

import sys

from graphdecode.cli import main

sys.argv[1:1] = ["profile"]
main()
