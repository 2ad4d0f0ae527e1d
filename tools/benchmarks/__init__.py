"""The subjects of `tools/bench`: modules with a function `main`, or with an `app` of several commands."""
