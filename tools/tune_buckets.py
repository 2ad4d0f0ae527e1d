"""Tune a bucket ladder to a recorded load; the same as `graphdecode buckets tune`."""

import sys

from graphdecode.cli import main

sys.argv[1:1] = ["buckets", "tune"]
main()
