"""Speculation on the device: n-gram drafts, and their verification."""
