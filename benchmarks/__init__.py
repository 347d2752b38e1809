"""Benchmarks: `python -m benchmarks NAME` prints ratios measured side by side in one run."""
