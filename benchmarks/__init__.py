"""Benchmarks of kvshare: each is `python -m benchmarks.NAME [--json]`."""
