"""Speculation on the device: drafts looked up, spread over queries, judged and settled."""
